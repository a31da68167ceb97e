"""Ranks that hold the same parameters, and the shares that they cut these into."""

from __future__ import annotations

from math import gcd, prod

from moefold.layout.placement import GRID_AXES
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.memory.run_setting import RunSetting


def shard_count(s: RunSetting, kind: ParameterClass) -> int:
    """Number of ranks among which the replicas of a class are shared out: all of them, or those of one copy."""
    replicas = replica_count(s, kind)
    return replicas // gcd(replicas, s.config.shard.replicas)


def replica_count(s: RunSetting, kind: ParameterClass) -> int:
    """Number of ranks that hold the same parameters of a class: the ranks along those axes of their grid that do not
    shard them."""
    grid, cut_axes = kind
    uncut_axes = [axis for axis in GRID_AXES[grid] if axis not in cut_axes]
    return prod(s.degrees[axis] for axis in uncut_axes)
