"""The commands with a line of help each."""

from __future__ import annotations

COMMANDS = {
    "train": "train a model: moefold train tiny",
    "data": "tokenize text once, for many runs: moefold data prepare SOURCES --out DIR",
    "presets": "list the models that ship with moefold, with their sizes: moefold presets",
    "explain": "show a model step by step, without running it: moefold explain qwen3-30b-a3b",
    "plan": "predict memory, time and the best layout: moefold plan qwen3-30b-a3b --gpus 16 --gpu h100",
    "web": "the planner as a page with sliders, served to this machine only: moefold web",
    "simulate": "simulate and draw a pipeline schedule: moefold simulate --schedule 1f1b --pp 4 --microbatches 16",
    "generate": 'continue a text, or answer a chat: moefold generate runs/tiny --prompt "def "',
    "eval": "perplexity of files and accuracy on tasks: moefold eval runs/tiny --files TEXT",
    "convert": "write weights as transformers loads them: moefold convert runs/tiny OUT --to hf",
    "ckpt": "inspect checkpoints: moefold ckpt ls RUN, moefold ckpt verify RUN, moefold ckpt diff A B",
    "report": "write a run's metrics as one HTML file: moefold report runs/tiny",
    "watch": "the same as a page that follows runs, served to this machine only: moefold watch runs/tiny",
    "bench": "time this machine: moefold bench kernels, layer, step, attention, save, calibrate and others",
    "doctor": "check this machine, or prove a layout equal to one rank: moefold doctor parity tiny --world 4",
}
