"""Kimi-K2: DeepSeek-V3 in everything but the name and the sizes."""

from __future__ import annotations

from dataclasses import replace

from moefold.checkpoint.hf.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, kind="kimi_k2")
