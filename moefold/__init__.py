"""moefold trains Mixture-of-Experts language models, from a laptop CPU to a cluster. Start reading at train/step.py."""

__version__ = "0.1.0"
