"""Power, temperature, load and clock of a GPU, as its driver measures them.

They are read through NVML, a library that the driver brings along: no package is needed, and the device is not waited
for. A figure that a driver or a card does not have is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_uint, c_void_p

import torch

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
SECONDS_APART = 1.0  # of two readings; the driver itself measures no more often than a few times a second
CORE_TEMPERATURE = 0  # which sensor, clock
PROCESSOR_CLOCK = 1


class LoadRates(Structure):
    """Percent of the time of the last readings, in which a kernel ran and in which memory was read or written."""

    _fields_ = [("kernels", c_uint), ("memory", c_uint)]


class GpuMeter:
    """Figures of one GPU. There are none on a CPU, and where the driver's library is missing."""

    def __init__(self, device: torch.device):
        self.library = open_library() if device.type == "cuda" else None
        self.handle = self.find_device(device) if self.library else None
        self.last_read = -SECONDS_APART

    def find_device(self, device: torch.device) -> c_void_p | None:
        """By its UUID: numbers of devices in a process are others than the driver's."""
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = c_void_p()
        is_found = self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(handle))
        return handle if is_found else None

    def call(self, name: str, *arguments: object) -> bool:
        """Whether the library has the function, and it succeeds."""
        function = getattr(self.library, name, None)
        return function is not None and function(*arguments) == SUCCESS

    def read(self) -> dict[str, float]:
        """All figures, or none if they were read less than a second ago."""
        now = time.monotonic()
        if self.handle is None or now - self.last_read < SECONDS_APART:
            return {}
        self.last_read = now
        figures = {name: figure(self) for name, figure in FIGURES.items()}
        return {name: value for name, value in figures.items() if value is not None}

    def number(self, name: str, *which: int) -> int | None:
        value = c_uint()
        is_read = self.call(name, self.handle, *which, byref(value))
        return value.value if is_read else None

    def watts(self) -> float | None:
        milliwatts = self.number("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def celsius(self) -> float | None:
        return self.number("nvmlDeviceGetTemperature", CORE_TEMPERATURE)

    def busy(self) -> float | None:
        """The share of time in which a kernel ran."""
        rates = LoadRates()
        is_read = self.call("nvmlDeviceGetUtilizationRates", self.handle, byref(rates))
        return rates.kernels / 100 if is_read else None

    def clock(self) -> float | None:
        """MHz of the processors."""
        return self.number("nvmlDeviceGetClockInfo", PROCESSOR_CLOCK)


FIGURES: dict[str, Callable[[GpuMeter], float | None]] = {
    "gpu_watts": GpuMeter.watts,
    "gpu_celsius": GpuMeter.celsius,
    "gpu_busy": GpuMeter.busy,
    "gpu_mhz": GpuMeter.clock,
}


def open_library() -> CDLL | None:
    try:
        library = CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == SUCCESS else None
