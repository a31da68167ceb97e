"""The version of the package, read by the build and written into checkpoints."""

__version__ = "0.1.0"
