"""Every rule is broken once, and what its message advises mends it."""

import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.keys import iterate_keys
from moefold.config.read import parse_overrides, with_values
from moefold.config.rules import RULES, ConfigOnRanks, ConfigRule, check_config, divisors_in_words
from moefold.config.run import Config
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from tests.support.machine_speed import least_seconds

FP8_LATENT = "--precision.recipe=fp8_block --model.attention.kind=mla --model.attention.kv_heads=4"

PREFERENCES = (
    "--train.objective=dpo --data.format=preferences --data.source=files --data.files=a.jsonl "
    "--data.attend=document --data.packing=best_fit"
)

SYMMETRIC = "--parallel.ep=2 --parallel.dispatcher=symmetric"
CHUNKS = "--parallel.ep=2 --parallel.row_chunks=2"
TILES = f"{SYMMETRIC} --parallel.tiles=experts"
LATENTS = "--model.attention.kind=mla --model.attention.qk_norm=none --model.attention.kv_heads=4"
PROJECTIONS = "--parallel.tp=2 --parallel.tiles=projections"
HEADS = "--parallel.cp=2 --parallel.context=all_to_all --parallel.tiles=heads"
CLONES = "--parallel.ep=2 --parallel.clone_slots=2 --parallel.dispatcher=dedup"
IN_STEP = "--pipeline.pair=true --pipeline.pairs=alike"

SAMPLES = "--data.batch_of=samples --data.packing=best_fit --data.attend=document"

# Without spaces: overrides are split at them.
FROZEN_EXPERTS = "--optim.groups=*.experts.*:frozen"

# rule -> (overrides that break it, number of ranks, what its message must name)
DYNAMIC = "--parallel.context_sizes=dynamic"
BREAKS: dict[str, list[tuple[str, int, str]]] = {
    "dynamic context has samples to group": [(DYNAMIC, 2, "context_sizes = dynamic, data.packing = windows")],
    "dynamic context holds the longest sample": [
        (f"{DYNAMIC} --parallel.cp=3", 3, "parallel.cp = 3 with train.micro_batch = 2"),
    ],
    "dynamic context has heads to swap": [
        (f"{DYNAMIC} --parallel.context=all_to_all", 8, "parallel.context = all_to_all"),
    ],
    "what groups send is of dynamic context": [
        ("--parallel.context_sending=0", 2, "parallel.context_sending = 0, parallel.context_sizes = fixed"),
    ],
    "what groups send can be read": [
        (f"{DYNAMIC} --parallel.context_sending=-1", 2, "parallel.context_sending = -1: expected numbers of keys"),
        (f"{DYNAMIC} --parallel.context_sending=1,2", 8, "parallel.context_sending = 1,2: expected numbers of keys"),
    ],
    "dynamic context sends rows that are counted": [
        (f"{DYNAMIC} --parallel.ep=2 --parallel.dispatcher=all_gather", 2, "parallel.dispatcher = all_gather"),
        (f"{DYNAMIC} --parallel.etp=2 --parallel.dispatcher=symmetric", 2, "parallel.dispatcher = symmetric"),
    ],
    "dynamic context has no clones": [
        (f"{DYNAMIC} --parallel.clone_slots=1 --parallel.ep=2", 2, "parallel.clone_slots = 1"),
    ],
    "a step of dynamic context is launched anew": [(f"{DYNAMIC} --memory.graphs=whole", 2, "memory.graphs = whole")],
    "dynamic context balances samples or batches": [
        (f"{DYNAMIC} --model.moe.balance.aux_over=microbatch", 2, "model.moe.balance.aux_over = microbatch"),
    ],
    "routing is recorded by sequence": [(f"{DYNAMIC} --train.record_routing=a", 2, "train.record_routing = a")],
    "weights are of prepared sources": [
        ("--data.weights=1/2", 1, "data.weights = 1/2, but data.source = stdlib"),
        ("--data.weights=1/2 --data.source=prepared --data.files=a", 1, "2 weights for 1 folders"),
    ],
    "targets of adapters can be read": [
        ("--lora.rank=4 --lora.targets=*.out:rank=0", 1, "lora.targets = *.out:rank=0: expected rank = a whole number"),
        ("--lora.rank=4 --lora.targets=*.out:rnak=2", 1, 'no option "rnak" (did you mean "rank"?)'),
    ],
    "targets have a rank": [("--lora.targets=*.attention.*", 1, "lora.rank = 0, lora.targets = *.attention.*")],
    "dropout has adapters": [("--lora.dropout=0.1", 1, "lora.rank = 0, lora.dropout = 0.1")],
    "magnitudes have adapters": [("--lora.dora=true", 1, "lora.rank = 0, lora.dora = true")],
    "a frozen base is not stored in FP8 alone": [
        ("--lora.rank=4 --precision.recipe=fp8_block --precision.storage=fp8", 1, "precision.storage = fp8"),
    ],
    "a frozen base is not clipped": [("--lora.rank=4 --optim.qk_clip=50", 1, "optim.qk_clip = 50")],
    "selection biases of a frozen base stay": [("--lora.rank=4", 1, "model.moe.balance.bias_rate = 0.01")],
    "a base in blocks is frozen": [("--lora.base=nf4", 1, "lora.base = nf4, lora.rank = 0")],
    "a base in blocks has plain products": [
        ("--lora.rank=4 --lora.base=nf4 --precision.recipe=fp8_block", 1, "precision.recipe = fp8_block"),
    ],
    "a base in blocks is in whole graphs of a GPU alone": [
        ("--lora.rank=4 --lora.base=fp8 --memory.graphs=static", 1, "lora.base = fp8, memory.graphs = static"),
    ],
    "a base in blocks is not invariant": [
        ("--lora.rank=4 --lora.base=mxfp4 --kernels.invariant=true", 1, "kernels.invariant = true"),
    ],
    "dpo reads preferences": [("--train.objective=dpo", 1, "train.objective = dpo, data.format = text")],
    "preferences are read by dpo": [(f"{PREFERENCES} --train.objective=next_token", 1, "data.format = preferences")],
    "preferences are whole": [(f"{PREFERENCES} --data.packing=windows", 1, "data.packing = windows")],
    "a step with a reference is launched anew": [(f"{PREFERENCES} --memory.graphs=whole", 1, "memory.graphs = whole")],
    "preferences look one token ahead": [(f"{PREFERENCES} --model.mtp=1", 1, "model.mtp = 1")],
    "losses by token are not scaled": [(f"{PREFERENCES} --train.precision=fp16", 1, "train.precision = fp16")],
    "losses by token are not invariant": [(f"{PREFERENCES} --kernels.invariant=true", 1, "kernels.invariant = true")],
    "experts of a reference are not recorded": [
        (f"{PREFERENCES} --train.record_routing=a", 1, "train.record_routing = a"),
    ],
    "a reference chooses its own experts": [
        (f"{PREFERENCES} --train.replay_routing=a", 1, "train.replay_routing = a"),
    ],
    "a reference has no delayed scales": [
        (f"{PREFERENCES} --precision.scaling=delayed --precision.recipe=fp8_tensor", 1, "precision.scaling = delayed"),
    ],
    "ranks clone experts of others": [
        ("--parallel.clone_slots=1 --parallel.dispatcher=dedup", 1, "parallel.clone_slots = 1, parallel.ep = 1"),
        ("--parallel.ep=2 --parallel.clone_slots=60 --parallel.dispatcher=dedup", 2, "parallel.clone_slots = 60"),
    ],
    "tiles are known": [
        ("--parallel.tiles=projektions", 1, '"projektions" names no tiles (did you mean "projections"?)')
    ],
    "projections inside exchanges have tensor-parallel ranks": [
        ("--parallel.tiles=projections", 1, "parallel.tiles = projections, parallel.tp = 1"),
    ],
    "heads inside exchanges have ranks that swap them": [
        ("--parallel.cp=2 --parallel.context=ring --parallel.tiles=heads", 2, "parallel.context = ring"),
        ("--parallel.tiles=heads", 1, "parallel.tiles = heads, parallel.context = auto, parallel.cp = 1"),
    ],
    "heads inside exchanges are not cut by tensor parallelism": [(f"{HEADS} --parallel.tp=2", 4, "parallel.tp = 2")],
    "heads inside exchanges are of grouped-query attention": [
        (f"{HEADS} {LATENTS}", 2, "model.attention.kind = mla"),
        (f"{HEADS} --model.attention.qk_norm=full", 2, "model.attention.qk_norm = full"),
    ],
    "heads inside exchanges have shares of key/value heads": [
        (f"{HEADS} --model.attention.kv_heads=1", 2, "model.attention.kv_heads = 1, parallel.cp = 2"),
    ],
    "heads inside exchanges are swapped once": [(f"{HEADS} --memory.recompute=sar", 2, "memory.recompute = sar")],
    "projections inside exchanges are plain": [
        (f"{HEADS} --precision.recipe=fp8_block", 2, "parallel.tiles = heads, precision.recipe = fp8_block"),
        (f"{PROJECTIONS} --precision.recipe=fp8_block", 2, "precision.recipe = fp8_block"),
        (f"{PROJECTIONS} --precision.tp_sums=fp8", 2, "precision.tp_sums = fp8"),
    ],
    "projections inside exchanges have no adapters": [
        (f"{PROJECTIONS} --lora.rank=4", 2, "lora.rank = 4"),
        (f"{HEADS} --lora.rank=4", 2, "lora.rank = 4"),
    ],
    "projections inside exchanges are of one pass at a time": [
        (f"{PROJECTIONS} --pipeline.pair=true", 2, "pipeline.pair = true"),
        (f"{PROJECTIONS} --pipeline.schedule=dualpipe_v --pipeline.vpp=2", 2, "pipeline.schedule = dualpipe_v"),
    ],
    "projections inside exchanges are not invariant": [
        (f"{PROJECTIONS} --kernels.invariant=true", 2, "kernels.invariant = true"),
    ],
    "projections inside exchanges have one number of rows": [
        (f"{PROJECTIONS} --parallel.context_sizes=dynamic", 2, "parallel.context_sizes = dynamic"),
    ],
    "projections inside exchanges are launched by the host": [
        (f"{PROJECTIONS} --memory.graphs=whole", 2, "memory.graphs = whole"),
    ],
    "projections inside exchanges of GPUs are of bf16": [
        (f"{PROJECTIONS} --train.device=cuda --train.precision=fp32", 2, "train.precision = fp32"),
    ],
    "row chunks are sent": [("--parallel.row_chunks=2", 1, "parallel.row_chunks = 2, parallel.ep = 1")],
    "layers in row chunks are not recomputed as one": [
        (f"{CHUNKS} --memory.recompute=moe@0", 2, "memory.recompute = moe@0"),
        (f"{CHUNKS} --memory.recompute=layer", 2, "memory.recompute = layer"),
    ],
    "row chunks have no clones": [
        (f"{CHUNKS} --parallel.clone_slots=2 --parallel.dispatcher=dedup", 2, "parallel.clone_slots = 2"),
    ],
    "row chunks are not stashed": [(f"{CHUNKS} --memory.stash=pages", 2, "memory.stash = pages")],
    "row chunks are not padded to capacity": [
        (f"{CHUNKS} --model.moe.capacity.pad=true --model.moe.capacity.factor=1", 2, "model.moe.capacity.pad = true"),
    ],
    "gradients of all row chunks are there before an update": [
        (f"{CHUNKS} --optim.when=backward --optim.clip_by=unit", 2, "optim.when = backward"),
    ],
    "row chunks are begun by the host": [(f"{CHUNKS} --memory.graphs=static", 2, "memory.graphs = static")],
    "tiled experts have an arena": [
        ("--parallel.ep=2 --parallel.tiles=experts", 2, "parallel.tiles = experts, parallel.dispatcher = auto"),
    ],
    "tiled experts have ranks that send": [
        ("--parallel.dispatcher=symmetric --parallel.tiles=experts", 2, "parallel.ep = 1, parallel.etp = 1"),
    ],
    "tiled experts are plain SwiGLU": [
        (f"{TILES} --model.moe.activation=relu2", 2, "model.moe.activation = relu2"),
        (f"{TILES} --model.moe.biases=true", 2, "model.moe.biases = true"),
        (f"{TILES} --model.moe.gate=output", 2, "model.moe.gate = output"),
    ],
    "tiled experts multiply plain numbers": [
        (f"{TILES} --precision.recipe=fp8_block", 2, "precision.recipe = fp8_block"),
    ],
    "tokens of tiled experts travel as they are": [
        (f"{TILES} --precision.dispatch=fp8", 2, "precision.dispatch = fp8"),
        (f"{TILES} --precision.combine_gradient=e4m3", 2, "precision.combine_gradient = e4m3"),
    ],
    "tiled experts have no adapters": [(f"{TILES} --lora.rank=4", 2, "lora.rank = 4")],
    "tiled experts have all rows at once": [
        (f"{TILES} --parallel.row_chunks=2", 2, "parallel.row_chunks = 2"),
        (f"{TILES} --memory.expert_chunk=128", 2, "memory.expert_chunk = 128"),
        (f"{TILES} --memory.stash=stack", 2, "memory.stash = stack"),
    ],
    "tiled experts are of one pass at a time": [
        (f"{TILES} --pipeline.pair=true", 2, "pipeline.pair = true"),
        (
            f"{TILES} --parallel.pp=2 --pipeline.vpp=2 --pipeline.schedule=dualpipe_v",
            4,
            "pipeline.schedule = dualpipe_v",
        ),
    ],
    "nothing inside tiled experts is recomputed by itself": [
        (f"{TILES} --memory.recompute=sar", 2, "memory.recompute = sar"),
        (f"{TILES} --memory.recompute=experts@1", 2, "memory.recompute = experts@1"),
    ],
    "nothing inside tiled experts is offloaded by itself": [
        (f"{TILES} --memory.offload=experts", 2, "memory.offload = experts"),
    ],
    "tiled experts are launched by the host": [(f"{TILES} --memory.graphs=static", 2, "memory.graphs = static")],
    "tiled experts are bf16 on a GPU": [
        (f"{TILES} --train.device=cuda --train.precision=fp32", 2, "train.precision = fp32"),
    ],
    "a decision has clones": [("--parallel.clone_decision=previous", 1, "parallel.clone_slots = 0")],
    "clones are sent by a dispatcher that counts": [
        ("--parallel.ep=2 --parallel.clone_slots=2", 2, "parallel.dispatcher = auto"),
    ],
    "cloned experts are whole on their rank": [(f"{CLONES} --shard.mode=zero3", 2, "shard.mode = zero3")],
    "clones are plain matrices": [
        (f"{CLONES} --precision.recipe=fp8_block", 2, "precision.recipe = fp8_block"),
        (f"{CLONES} --precision.dispatch=fp8", 2, "precision.dispatch = fp8"),
    ],
    "clones are without biases and adapters": [
        (f"{CLONES} --model.moe.biases=true", 2, "model.moe.biases = true"),
        (f"{CLONES} --lora.rank=4", 2, "lora.rank = 4"),
    ],
    "rows of clones are not padded": [
        (f"{CLONES} --model.moe.capacity.pad_rows=8", 2, "model.moe.capacity.pad_rows = 8"),
    ],
    "clones are sent once": [
        (f"{CLONES} --memory.recompute=sar", 2, "memory.recompute = sar"),
        (f"{CLONES} --memory.recompute=experts@1", 2, "memory.recompute = experts@1"),
        (f"{CLONES} --memory.expert_chunk=128", 2, "memory.expert_chunk = 128"),
    ],
    "gradients of clones arrive before an update": [
        (f"{CLONES} --optim.when=backward --optim.clip_by=unit", 2, "optim.when = backward"),
    ],
    "one lane at a time adds to experts that are cloned": [
        (f"{CLONES} --pipeline.pair=true", 2, "pipeline.fill = true"),
    ],
    "a bound of rows has an arena": [("--parallel.ep=2 --parallel.room=1.5", 2, "parallel.dispatcher = auto")],
    "a bound of rows has ranks that send": [
        ("--parallel.dispatcher=symmetric --parallel.room=1.5", 2, "parallel.ep = 1, parallel.etp = 1"),
    ],
    "an even load has room": [(f"{SYMMETRIC} --parallel.room=0.9", 2, "parallel.room = 0.9")],
    "a bounded step updates at its end": [
        (f"{SYMMETRIC} --parallel.room=2 --train.precision=fp16", 2, "train.precision = fp16"),
        (f"{SYMMETRIC} --parallel.room=2 --optim.clip_by=previous", 2, "optim.clip_by = previous"),
    ],
    "a bounded step is recorded once": [
        (f"{SYMMETRIC} --parallel.room=2 --train.record_routing=a", 2, "train.record_routing = a"),
        (f"{SYMMETRIC} --parallel.room=2 --observe.compare_every=5", 2, "observe.compare_every = 5"),
    ],
    "copies divide the replicas": [("--shard.replicas=3", 4, "shard.replicas = 3 does not divide dp x cp = 4")],
    "units of paired slots are gathered in one order": [
        ("--shard.mode=zero3 --memory.recompute=moe --pipeline.pair=true", 2, "memory.recompute = moe"),
    ],
    "tokens that are dispatched again are normed with whole weights": [
        ("--shard.mode=zero3 --memory.recompute=sar --parallel.ep=2", 2, "memory.recompute = sar"),
        ("--shard.mode=zero3 --memory.recompute=dispatch@1 --parallel.etp=2", 2, "parallel.etp = 2"),
    ],
    "clipped logits are not normed": [
        ("--optim.qk_clip=50 --model.attention.qk_norm=head", 1, "optim.qk_clip = 50"),
    ],
    "split main weights are of bf16 weights": [("--optim.main=split --train.precision=fp32", 1, "optim.main = split")],
    "bf16 gradients are of bf16 weights": [
        ("--optim.gradients=bf16 --train.precision=fp32 --train.micro_batch=16", 1, "optim.gradients = bf16")
    ],
    "stochastic rounding has something to round": [("--optim.rounding=stochastic", 1, "optim.rounding = stochastic")],
    "rounding of main weights has something to round": [
        ("--optim.main_rounding=nearest --optim.main=split", 1, "optim.main = split")
    ],
    "main weights in blocks are AdamW's": [("--optim.main=fp16 --optim.rule=muon", 1, "optim.main = fp16")],
    "moments in blocks are AdamW's": [
        ("--optim.moments=int8 --optim.rule=muon", 1, "optim.moments = int8"),
        ("--optim.moments=fp8 --optim.groups=*.experts.*:rule=muon", 1, "optim.moments = fp8"),
    ],
    "states on the host are read by their update alone": [
        ("--optim.states=host --optim.qk_clip=50", 1, "optim.qk_clip = 50"),
        ("--optim.states=host --precision.recipe=fp8_block --precision.storage=fp8", 1, "precision.storage = fp8"),
    ],
    "updates on the host are AdamW's": [
        ("--optim.update=host --optim.states=host --optim.rule=muon", 1, "optim.rule = muon"),
        ("--optim.update=host --optim.states=host --optim.groups=*.experts.*:rule=muon", 1, "optim.update = host"),
    ],
    "updates on the host have fp32 states there": [
        ("--optim.update=host", 1, "optim.states = device"),
        ("--optim.update=host --optim.states=host --optim.moments=int8", 1, "optim.moments = int8"),
    ],
    "updates in backward know their clipping": [("--optim.when=backward", 1, "optim.clip_by = global")],
    "units are of one stage": [
        ("--optim.when=backward --optim.clip_by=previous --parallel.pp=2", 2, "optim.when = backward"),
        ("--optim.clip_by=unit --parallel.pp=2", 2, "optim.clip_by = unit"),
    ],
    "sums of gradients tell a microbatch's apart": [
        ("--optim.gradients=bf16 --train.global_batch=8 --train.micro_batch=4", 1, "train.micro_batch = 4"),
        ("--optim.gradients=int8 --train.global_batch=66 --train.micro_batch=2", 1, "32 in int8"),
    ],
    "gradients in blocks are AdamW's": [
        ("--optim.gradients=int8 --optim.rule=muon", 1, "optim.gradients = int8"),
    ],
    "gradients in blocks have a place of their own": [
        ("--optim.gradients=fp16 --shard.mode=zero3 --optim.gradient_reduce=bf16", 2, "shard.mode = zero3"),
        ("--optim.gradients=fp16 --optim.states=host --optim.update=host", 1, "optim.update = host"),
    ],
    "bf16 gradients are sent as bf16 or fp8": [
        ("--optim.gradients=bf16 --train.micro_batch=16", 2, "optim.gradient_reduce = fp32")
    ],
    "FP8 gradients are sent": [
        ("--optim.gradient_reduce=fp8", 1, "a stage has one rank, so no gradient is sent"),
        ("--optim.gradient_reduce=fp8 --parallel.pp=2", 2, "parallel.pp = 2"),
    ],
    "optimizer groups can be read": [
        ("--optim.groups=*.weight:lr=fast", 1, "optim.groups = *.weight:lr=fast: expected lr = a factor"),
        ("--optim.groups=*.weight:rule=adam", 1, 'no rule "adam" (did you mean "adamw"?)'),
    ],
    "recomputed regions can be read": [
        ("--memory.recompute=nrom", 1, 'entry "nrom" names no region (did you mean "norm"?)'),
        (
            "--memory.recompute=moe@",
            1,
            'entry "moe@" cannot be read; expected region, region@layer, region@first-last or',
        ),
        ("--memory.recompute=moe@3-1", 1, 'entry "moe@3-1" ends before it begins'),
        ("--memory.recompute=norm,layer@2-4", 1, "names layer 4; the model has layers 0 to 3"),
        ("--memory.recompute=out", 1, "nothing is saved by rebuilding region out"),
        ("--memory.recompute=experts@1,moe@0-1", 1, 'region "experts" lies inside "moe"'),
        ("--memory.recompute=core,layer", 1, 'region "core" lies inside "layer"'),
        ("--memory.recompute=sar@", 1, 'entry "sar@" cannot be read'),
        ("--memory.recompute=moe@0-4/3", 1, "names layer 4; the model has layers 0 to 3"),
        ("--memory.recompute=moe@0-3/0", 1, 'entry "moe@0-3/0" cannot be read'),
        ("--memory.recompute=moe@0-9999999999", 1, 'entry "moe@0-9999999999" cannot be read'),
        ("--memory.recompute=sar,moe@1", 1, 'region "dispatch" lies inside "moe"'),
    ],
    "offloaded regions can be read": [
        ("--memory.offload=cores", 1, 'entry "cores" names no region (did you mean "core"?)'),
        ("--memory.offload=norm@3", 1, 'region "norm" is named for layer 3 alone, which is the last and stays'),
        ("--memory.offload=experts,moe", 1, 'region "experts" lies inside "moe"'),
        ("--memory.offload=experts --memory.recompute=moe@1", 1, "which is recomputed: it keeps nothing to offload"),
        ("--memory.offload=layer --model.layers=1", 1, "named for layer 0 alone"),
        ("--memory.offload=dispatch", 1, "region dispatch saves nothing inside"),
        ("--memory.offload=expert_weight", 1, '(did you mean "expert_weights"?)'),
        ("--memory.offload=expert_weights@4 --lora.rank=4", 1, "names layer 4; the model has layers 0 to 3"),
    ],
    "expert chunks are whole tiles": [("--memory.expert_chunk=100", 1, "memory.expert_chunk = 100")],
    "recomputed exchanges of paired slots have one order": [
        ("--memory.recompute=moe@1 --pipeline.pair=true --parallel.tp=2", 2, "pipeline.pair = true"),
        ("--memory.recompute=layer@1-2 --pipeline.pair=true --parallel.cp=2", 2, "parallel.cp = 2"),
    ],
    "passes in step are paired": [
        ("--pipeline.pairs=alike", 1, "pipeline.pair = false"),
        (f"{IN_STEP} --parallel.pp=2 --pipeline.schedule=dualpipe_v --pipeline.vpp=2", 2, "dualpipe_v"),
    ],
    "weights of passes in step stay": [
        (f"{IN_STEP} --shard.mode=zero3", 2, "shard.mode = zero3"),
        (f"{IN_STEP} --memory.offload=expert_weights --lora.rank=4", 1, "memory.offload = expert_weights"),
    ],
    "clones are of one microbatch": [(f"{CLONES} {IN_STEP} --pipeline.fill=false", 2, "parallel.clone_slots = 2")],
    "static graphs have one microbatch in a layer": [
        (f"{IN_STEP} --memory.graphs=static --train.device=cuda", 1, "memory.graphs = static"),
    ],
    "a stack is of one microbatch at a time": [
        ("--memory.stash=stack --parallel.pp=2", 2, "parallel.pp = 2"),
        ("--memory.stash=stack --pipeline.pair=true", 1, "pipeline.pair = true"),
    ],
    "a stash has plain rows": [
        ("--memory.stash=pages --precision.recipe=fp8_block", 1, "precision.recipe = fp8_block")
    ],
    "a stashed step updates at its end": [
        ("--memory.stash=stack --optim.when=backward --optim.clip_by=unit", 1, "optim.when = backward"),
        ("--memory.stash=stack --train.precision=fp16", 1, "train.precision = fp16"),
    ],
    "stashed experts have one set of rows": [
        ("--memory.stash=stack --memory.expert_chunk=128", 1, "memory.expert_chunk = 128"),
        (f"{CLONES} --memory.stash=pages", 2, "parallel.clone_slots = 2"),
    ],
    "stashed rows stay on the device": [
        ("--memory.stash=stack --memory.offload=experts@0", 1, "memory.offload = experts@0"),
        ("--memory.stash=stack --memory.offload=layer --memory.recompute=moe@0", 1, "memory.offload = layer"),
    ],
    "a stash has rows to keep": [
        ("--memory.stash=stack --memory.recompute=moe", 1, "memory.recompute = moe"),
        ("--memory.stash=stack --memory.recompute=experts@0-2,layer@3", 1, "layer@3"),
        ("--memory.stash=stack --memory.recompute=experts@1-3 --model.moe.dense_layers=1", 1, "dense_layers = 1"),
    ],
    "static graphs are of a GPU": [("--memory.graphs=static --train.device=cpu", 1, "train.device = cpu")],
    "static graphs have no collectives": [
        ("--memory.graphs=static --parallel.tp=2", 2, "parallel.tp = 2"),
        ("--memory.graphs=static --parallel.cp=2", 2, "parallel.cp = 2"),
    ],
    "static graphs find weights in their places": [
        ("--memory.graphs=static --shard.mode=zero3", 1, "shard.mode = zero3"),
        ("--memory.graphs=static --optim.states=host", 1, "optim.states = host"),
        ("--memory.graphs=static --precision.storage=fp8 --precision.recipe=fp8_block", 1, "precision.storage = fp8"),
        (f"--memory.graphs=static --memory.offload=expert_weights {FROZEN_EXPERTS}", 1, "offload = expert_weights"),
    ],
    "static graphs keep what they save": [
        ("--memory.graphs=static --memory.offload=core", 1, "memory.offload = core"),
    ],
    "static graphs tell the host nothing": [
        ("--memory.graphs=static --train.record_routing=a.routing", 1, "train.record_routing = a.routing"),
        ("--memory.graphs=static --optim.qk_clip=50 --model.attention.qk_norm=none", 1, "optim.qk_clip = 50"),
    ],
    "no exchange of a whole graph needs the host": [
        ("--memory.graphs=whole --parallel.ep=2", 2, "parallel.ep = 2 is in the way"),
        ("--memory.graphs=whole --parallel.pp=2 --parallel.cp=2", 4, "parallel.cp = 2, parallel.pp = 2 is in the way"),
        ("--memory.graphs=whole --parallel.pp=2 --parallel.dispatcher=symmetric", 2, "parallel.pp = 2 is in the way"),
    ],
    "a whole graph is of bf16 on a GPU": [
        ("--memory.graphs=whole --train.device=cpu", 1, "train.device = cpu"),
        ("--memory.graphs=whole --train.precision=fp32", 1, "train.precision = fp32"),
    ],
    "expert weights on the host are frozen": [
        ("--memory.offload=expert_weights", 1, "fetched from the host and never written back"),
        ("--memory.offload=expert_weights@1,core", 1, "memory.offload = expert_weights@1,core"),
    ],
    "expert weights on the host have no clones": [
        (
            f"--memory.offload=expert_weights {FROZEN_EXPERTS} --parallel.clone_slots=1 --parallel.ep=2",
            2,
            "parallel.clone_slots = 1",
        ),
    ],
    "expert weights on the host are those of one model": [
        (f"--memory.offload=expert_weights {FROZEN_EXPERTS} --train.objective=dpo", 1, "train.objective = dpo"),
    ],
    "a whole graph offloads nothing": [
        ("--memory.graphs=whole --memory.offload=layer", 1, "memory.offload = layer"),
        ("--memory.graphs=whole --optim.states=host", 1, "optim.states = host"),
    ],
    "a whole graph has one lane": [
        ("--memory.graphs=whole --pipeline.pair=true", 1, "pipeline.pair = true"),
        ("--memory.graphs=whole --train.device=cuda --shard.sync=hierarchical", 1, "shard.sync = hierarchical"),
    ],
    "a tape is shared where there is one": [("--memory.tape_processes=2", 1, "memory.tape_processes = 2")],
    "a whole graph records no routing": [
        ("--memory.graphs=whole --train.record_routing=a.routing", 1, "train.record_routing = a.routing"),
    ],
    "a whole graph finds stored weights in their places": [
        (
            "--memory.graphs=whole --precision.storage=fp8 --precision.recipe=fp8_tensor",
            1,
            "precision.recipe = fp8_tensor",
        ),
        (
            "--memory.graphs=whole --precision.storage=fp8 --precision.recipe=fp8_block --optim.rule=muon",
            1,
            "optim.rule = muon",
        ),
        ("--memory.graphs=whole --precision.storage=fp8 --precision.recipe=fp8_block", 2, "on one replica"),
    ],
    "precision recipes can be read": [
        ("--precision.recipes=*.attention.*", 1, "precision.recipes = *.attention.*: expected a pattern, a colon"),
        ("--precision.recipes=*:fp8_blok", 1, 'no recipe "fp8_blok" (did you mean "fp8_block"?)'),
    ],
    "precision.power_of_two_scales is used": [
        ("--precision.power_of_two_scales=true", 1, "precision.power_of_two_scales = true")
    ],
    "precision.gradient_format is used": [("--precision.gradient_format=e5m2", 1, "precision.recipe = plain")],
    "precision.scale_rounding is used": [("--precision.scale_rounding=down", 1, "no recipe in use is mxfp8")],
    "precision.weight_blocks is used": [
        ("--precision.weight_blocks=squares --precision.recipe=fp8_block", 1, "precision.weight_blocks = squares")
    ],
    "precision.hadamard is used": [("--precision.hadamard=false", 1, "no recipe in use is nvfp4")],
    "precision.stochastic is used": [
        ("--precision.stochastic=false --precision.recipe=mxfp8", 1, "precision.recipe = mxfp8")
    ],
    "precision.rounding_seed is used": [("--precision.rounding_seed=3", 1, "precision.rounding_seed = 3")],
    "precision.dispatch is used": [("--precision.dispatch=fp8", 2, "parallel.ep = 1")],
    "precision.combine_gradient is used": [("--precision.combine_gradient=e5m2", 1, "so no token is sent")],
    "precision.tp_sums is used": [("--precision.tp_sums=fp8", 1, "there is one tp rank")],
    "precision.tp_sum_gradients is used": [("--precision.tp_sum_gradients=fp8", 2, "parallel.tp = 1")],
    "deepep sends bf16": [
        ("--parallel.dispatcher=deepep --parallel.ep=2 --precision.dispatch=fp8", 2, "precision.dispatch = fp8"),
        (
            "--parallel.dispatcher=deepep --parallel.ep=2 --precision.combine_gradient=e4m3",
            2,
            "precision.combine_gradient = e4m3",
        ),
    ],
    "invariant runs drop nothing": [
        ("--kernels.invariant=true --model.moe.capacity.factor=1.5", 1, "model.moe.capacity.factor = 1.5")
    ],
    "tokens of invariant runs choose their experts": [
        (
            "--kernels.invariant=true --model.moe.router.kind=sinkhorn --model.moe.router.looks_ahead=true",
            1,
            "model.moe.router.kind = sinkhorn",
        ),
    ],
    "invariant runs route by scores alone": [
        ("--kernels.invariant=true --model.moe.router.jitter=0.1", 1, "model.moe.router.jitter = 0.1"),
        ("--kernels.invariant=true --model.moe.router.force_balance=true", 1, "force_balance = true"),
    ],
    "adapters of invariant runs drop nothing": [
        (
            "--kernels.invariant=true --lora.rank=4 --lora.dropout=0.1 --model.moe.balance.bias_rate=0",
            1,
            "lora.dropout = 0.1",
        ),
    ],
    "products of invariant runs are plain": [
        ("--kernels.invariant=true --precision.recipe=fp8_block", 1, "precision.recipe = fp8_block"),
    ],
    "invariant runs sum a token's results in one order": [
        ("--kernels.invariant=true --parallel.dispatcher=dedup --parallel.ep=2", 2, "parallel.dispatcher = dedup"),
    ],
    "sequences of invariant runs are whole": [("--kernels.invariant=true --parallel.cp=2", 2, "parallel.cp = 2")],
    "invariant runs are launched by the host": [
        ("--kernels.invariant=true --memory.graphs=whole", 1, "memory.graphs = whole"),
    ],
    "invariant runs choose their kernels": [
        ("--kernels.invariant=true --kernels.force=attention=reference", 1, "kernels.force = attention=reference"),
    ],
    "precision.loss_scale is used": [("--precision.loss_scale=1024", 1, "only fp16 has a loss scale")],
    "precision.loss_scale_growth is used": [
        ("--precision.loss_scale_growth=5 --train.precision=bf16", 1, "train.precision = bf16")
    ],
    "fp16 products are plain": [
        ("--train.precision=fp16 --precision.recipe=fp8_block", 1, "train.precision = fp16"),
        ("--train.precision=fp16 --precision.recipes=*.experts.*:mxfp8", 1, "quantised products read and write bf16"),
    ],
    "precision.storage is used": [("--precision.storage=fp8", 1, "precision.storage = fp8")],
    "FP8 storage has one set of bytes for both layouts": [
        ("--precision.storage=fp8 --precision.recipe=fp8_row", 1, "but fp8_row quantises each layout"),
        (
            "--precision.storage=fp8 --precision.recipe=fp8_block --precision.recipes=*.attention.*:fp8_row",
            1,
            "precision.recipes = *.attention.*:fp8_row",
        ),
    ],
    "precision.accumulate is used": [
        ("--precision.accumulate=fast --precision.recipe=fp8_block", 1, "precision.recipe = fp8_block"),
    ],
    "precision.scaling is used": [
        ("--precision.scaling=delayed --precision.recipe=fp8_block", 1, "precision.scaling = delayed"),
        ("--precision.scaling=delayed", 1, "no recipe in use applies scales to finished sums"),
    ],
    "precision.exclude_first is used": [("--precision.exclude_first=1", 1, "precision.exclude_first = 1")],
    "precision.exclude_last is used": [
        ("--precision.exclude_last=1 --precision.recipes=*:fp8_row", 1, "precision.recipe, which is plain")
    ],
    "precision.history is used": [
        ("--precision.history=4 --precision.recipe=fp8_row", 1, "precision.scaling = current")
    ],
    "precision.margin is used": [
        ("--precision.margin=1 --precision.scaling=delayed --precision.recipe=fp8_block", 1, "no scales are delayed"),
    ],
    "some layer is not excluded": [
        ("--precision.recipe=fp8_row --precision.exclude_first=2 --precision.exclude_last=2", 1, "model.layers = 4"),
    ],
    "FP8 fits model.hidden": [("--precision.recipe=fp8_block --model.hidden=136", 1, "model.hidden = 136")],
    "FP8 fits model.dense_ffn": [
        ("--precision.recipe=fp8_block --model.moe.dense_layers=1 --model.dense_ffn=72", 1, "model.dense_ffn = 72"),
    ],
    "FP8 fits model.moe.ffn": [
        ("--precision.recipe=fp8_hybrid --parallel.etp=4 --model.moe.ffn=32", 4, "a width of 8 on a rank"),
        ("--precision.recipe=fp8_tensor --model.moe.ffn=40", 1, "model.moe.ffn = 40"),
    ],
    "FP8 fits model.moe.shared_ffn": [
        ("--precision.recipe=fp8_row --parallel.tp=2 --model.moe.shared_ffn=16", 2, "model.moe.shared_ffn = 16"),
    ],
    "FP8 fits model.moe.latent": [("--precision.recipe=fp8_block --model.moe.latent=24", 1, "model.moe.latent = 24")],
    "FP8 fits model.attention.head_dim": [
        (
            "--precision.recipe=fp8_block --parallel.tp=2 --model.attention.head_dim=24",
            2,
            "model.attention.head_dim = 24 is a width of 24 on a rank",
        ),
    ],
    "FP8 fits model.attention.value_dim": [
        (
            f"{FP8_LATENT} --model.attention.rope_dim=16 --model.attention.value_dim=6",
            1,
            "model.attention.value_dim = 6",
        )
    ],
    "FP8 fits model.attention.rope_dim": [
        (f"{FP8_LATENT} --model.attention.rope_dim=8", 1, "model.attention.rope_dim = 8")
    ],
    "FP8 fits model.attention.q_rank": [
        (f"{FP8_LATENT} --model.attention.rope_dim=16 --model.attention.q_rank=12", 1, "model.attention.q_rank = 12")
    ],
    "FP8 fits model.attention.kv_rank": [
        (f"{FP8_LATENT} --model.attention.rope_dim=16 --model.attention.kv_rank=40", 1, "model.attention.kv_rank = 40")
    ],
    "what is kept is written": [
        ("--checkpoint.every=100 --checkpoint.keep_every=250", 1, "checkpoint.keep_every = 250"),
        ("--checkpoint.every=100 --checkpoint.keep_every=50", 1, "checkpoint.every = 100"),
    ],
    "routing is not recorded over what is replayed": [
        ("--train.record_routing=a --train.replay_routing=a", 1, "train.record_routing = a"),
    ],
    "the fault can be injected": [
        ("--observe.fault=nothing", 1, "observe.fault = nothing begins with none of nan, inf, flip"),
        ("--observe.fault=nan", 1, "names 0 of weight, gradient, output"),
        ("--observe.fault=slow", 1, "observe.fault = slow says no times=, such as times=9"),
    ],
    "skipped spikes are looked for": [
        ("--train.skip_spikes=true", 1, "observe.spike = 0"),
        ("--train.skip_spikes=true --observe.spike=9 --optim.when=backward --optim.clip_by=unit", 1, "optim.when"),
    ],
    "compared weights are whole until the update": [
        ("--observe.compare_every=5 --optim.when=backward --optim.clip_by=unit", 1, "observe.compare_every = 5"),
    ],
    "the checkpoint path names a place": [
        ("--checkpoint.path=://run", 1, "checkpoint.path = ://run"),
        ("--checkpoint.path=s3:bucket", 1, "checkpoint.path = s3:bucket"),
    ],
    "the reference loss has the whole vocabulary": [
        ("--parallel.tp=2 --kernels.force=cross_entropy=reference", 2, "kernels.force = cross_entropy=reference")
    ],
    "the name can be a folder's": [("--name=../up", 1, "name = ../up")],
    "kv heads divide heads": [
        ("--model.attention.kv_heads=3", 1, "model.attention.kv_heads = 3"),
        ("--model.attention.heads=6 --model.attention.kv_heads=12", 1, "model.attention.heads = 6"),
    ],
    "head width is even": [("--model.attention.head_dim=33", 1, "model.attention.head_dim = 33")],
    "top-k within experts": [("--model.moe.top_k=9", 1, "model.moe.top_k = 9")],
    "dense layers within layers": [
        ("--model.moe.dense_layers=5", 1, "model.moe.dense_layers = 5"),
        ("--model.moe.dense_layers=6 --model.mtp=1", 1, "model.moe.dense_layers = 6"),
    ],
    "llama3 frequencies in order": [
        ("--model.attention.rope.scaling=llama3 --model.attention.rope.low_frequency=4", 1, "low_frequency = 4")
    ],
    "files are named": [
        ("--data.source=files", 1, "data.source = files"),
        ("--data.source=stdlib --data.files=a.txt,b.txt", 1, "data.files = a.txt,b.txt"),
    ],
    "packed documents attend within themselves": [
        ("--data.packing=best_fit", 1, "data.packing = best_fit"),
    ],
    "packed documents are routed by themselves": [
        (
            "--data.packing=first_fit --data.attend=document --model.moe.capacity.factor=1.5",
            1,
            "model.moe.capacity.factor = 1.5",
        ),
    ],
    "counted samples are packed": [("--data.batch_of=samples", 1, "data.batch_of = samples")],
    "a bin of counted samples is a microbatch": [(f"{SAMPLES} --train.micro_batch=2", 1, "train.micro_batch = 2")],
    "steps of other lengths are launched anew": [(f"{SAMPLES} --memory.graphs=whole", 1, "memory.graphs = whole")],
    "recorded sequences are counted": [
        (f"{SAMPLES} --train.record_routing=a", 1, "train.record_routing = a"),
        (f"{SAMPLES} --train.replay_routing=a", 1, "train.replay_routing = a"),
    ],
    "samples are read from files": [
        ("--data.format=chat", 1, "data.format = chat"),
        ("--data.format=pairs --data.source=prepared --data.files=a", 1, "data.source = prepared"),
    ],
    "there are documents to attend within": [("--data.attend=document --data.source=zipf", 1, "data.source = zipf")],
    "bytes fit the vocabulary": [("--model.vocab=255", 1, "model.vocab = 255")],
    "dense grid fits the world": [("--parallel.tp=3 --parallel.pp=2", 8, "parallel.tp x cp x pp = 6")],
    "expert grid fits the world": [("--parallel.ep=3", 8, "parallel.etp x ep x pp = 3")],
    "global batch splits evenly": [
        ("--train.micro_batch=3", 1, "train.micro_batch = 3"),
        ("--train.global_batch=24 --train.micro_batch=4", 4, "train.micro_batch = 4"),
        ("", 3, "train.global_batch = 8"),
        ("--parallel.tp=2", 6, "3 data-parallel ranks"),
    ],
    "tp splits model.attention.heads": [("--parallel.tp=8", 8, "model.attention.heads = 4")],
    "tp splits model.attention.kv_heads": [
        ("--model.attention.heads=6 --model.attention.kv_heads=3 --parallel.tp=2", 2, "model.attention.kv_heads = 3"),
        ("--model.attention.heads=6 --model.attention.kv_heads=6 --parallel.tp=4", 4, "parallel.tp = 4"),
    ],
    "tp splits model.vocab": [("--model.vocab=257 --parallel.tp=2", 2, "model.vocab = 257")],
    "tp splits model.dense_ffn": [
        ("--model.moe.dense_layers=1 --model.dense_ffn=33 --parallel.tp=2", 2, "model.dense_ffn = 33")
    ],
    "tp splits model.moe.shared_ffn": [("--model.moe.shared_ffn=31 --parallel.tp=2", 2, "model.moe.shared_ffn = 31")],
    "ep splits model.moe.experts": [
        ("--parallel.ep=16", 16, "parallel.ep = 16 does not divide model.moe.experts = 8"),
        ("--parallel.ep=3", 6, "parallel.ep = 3"),
    ],
    "etp splits model.moe.ffn": [("--model.moe.ffn=30 --parallel.etp=4", 4, "model.moe.ffn = 30")],
    "sequences split evenly": [
        ("--data.seq_len=250 --parallel.cp=2", 2, "data.seq_len = 250"),
        ("--data.seq_len=255 --parallel.tp=2", 2, "data.seq_len = 255"),
        ("--data.seq_len=36 --parallel.cp=2 --parallel.tp=2", 4, "parallel.cp = 2"),
    ],
    "all-to-all context has heads to swap": [
        ("--parallel.cp=8 --parallel.context=all_to_all", 8, "model.attention.kv_heads = 2"),
        ("--parallel.cp=4 --parallel.tp=2 --parallel.context=all_to_all", 8, "share 2 query heads of a rank"),
    ],
    "padding to capacity has a capacity": [
        ("--model.moe.capacity.pad=true", 1, "model.moe.capacity.pad = true"),
        (
            "--model.moe.capacity.pad=true --model.moe.capacity.factor=1.5 --model.moe.capacity.over=full_sequence",
            1,
            "model.moe.capacity.over = full_sequence",
        ),
    ],
    "rotary dims fit the head": [
        ("--model.attention.rope_dim=7", 1, "model.attention.rope_dim = 7"),
        ("--model.attention.rope_dim=64", 1, "model.attention.head_dim = 32"),
    ],
    "mla has rotary and other dims": [
        ("--model.attention.kind=mla", 1, "model.attention.rope_dim = 0"),
        ("--model.attention.kind=mla --model.attention.rope_dim=32", 1, "model.attention.head_dim = 32"),
        (
            "--model.attention.kind=mla --model.attention.rope_dim=4 --model.attention.head_dim=4",
            1,
            "model.attention.rope_dim = 4",
        ),
        ("--model.attention.kind=mla --model.attention.head_dim=2", 1, "model.attention.head_dim = 2"),
    ],
    "mla has a key head for each query head": [
        ("--model.attention.kind=mla --model.attention.rope_dim=8", 1, "model.attention.kv_heads = 2")
    ],
    "mla norms its latents only": [
        ("--model.attention.kind=mla --model.attention.qk_norm=full", 1, "model.attention.qk_norm = full")
    ],
    "latents are mla's": [
        ("--model.attention.q_rank=8", 1, "model.attention.q_rank = 8"),
        ("--model.attention.value_dim=16", 1, "model.attention.value_dim = 16"),
    ],
    "full layers are for windows": [("--model.attention.full_every=2", 1, "model.attention.full_every = 2")],
    "groups divide experts": [("--model.moe.router.groups=3", 1, "model.moe.router.groups = 3")],
    "chosen groups exist": [
        ("--model.moe.router.groups_chosen=2", 1, "model.moe.router.groups_chosen = 2"),
        ("--model.moe.router.groups=4 --model.moe.router.groups_chosen=5", 1, "model.moe.router.groups = 4"),
    ],
    "chosen groups hold enough experts": [
        ("--model.moe.router.groups=4 --model.moe.top_k=3", 1, "model.moe.top_k = 3"),
        (
            "--model.moe.router.groups=8 --model.moe.router.groups_chosen=3 --model.moe.top_k=8",
            1,
            "model.moe.router.groups_chosen = 3",
        ),
    ],
    "devices divide experts": [("--model.moe.balance.devices=3", 1, "model.moe.balance.devices = 3")],
    "device capacity is a capacity": [
        ("--model.moe.capacity.per_device=true", 1, "model.moe.capacity.factor = 0"),
        (
            "--model.moe.capacity.per_device=true --model.moe.capacity.factor=1.5 --model.moe.capacity.pad=true",
            1,
            "model.moe.capacity.pad = true",
        ),
    ],
    "looking ahead is accepted": [
        ("--model.moe.router.kind=expert_choice", 1, "model.moe.router.kind = expert_choice"),
        ("--model.moe.router.kind=sinkhorn", 1, "model.moe.router.looks_ahead = false"),
    ],
    "routers that balance by themselves have no bias": [
        ("--model.moe.router.kind=sinkhorn --model.moe.balance.bias_rate=0.1", 1, "model.moe.balance.bias_rate = 0.1"),
        ("--model.moe.router.kind=expert_choice --model.moe.router.groups=2", 1, "model.moe.router.groups = 2"),
    ],
    "devices are for something": [("--model.moe.balance.devices=4", 1, "model.moe.balance.devices = 4")],
    "forced balance takes the place of the tokens' choice": [
        (
            "--model.moe.router.kind=sinkhorn --model.moe.router.looks_ahead=true "
            "--model.moe.router.force_balance=true",
            1,
            "model.moe.router.force_balance = true",
        )
    ],
    "experts that choose are balanced": [
        (f"--model.moe.router.kind=expert_choice --model.moe.{key}", 1, f"model.moe.{key.replace('=', ' = ')}")
        for key in ("balance.aux_loss=0.5", "balance.device_loss=0.5", "capacity.pad=true")
    ],
    "a softmax over the chosen is normalised over them": [
        (
            "--model.moe.router.score=softmax_chosen --model.moe.router.normalize=none",
            1,
            "model.moe.router.normalize = none",
        ),
        (
            "--model.moe.router.score=softmax_chosen --model.moe.router.normalize=all",
            1,
            "model.moe.router.score = softmax_chosen",
        ),
    ],
    "a whole graph updates all weights at its end": [
        ("--memory.graphs=whole --train.device=cuda --shard.mode=zero3", 1, "shard.mode = zero3"),
        ("--memory.graphs=whole --train.device=cuda --optim.clip_by=previous", 1, "optim.clip_by = previous"),
    ],
    "updates in backward are never skipped": [
        ("--optim.when=backward --optim.clip_by=unit --train.precision=fp16", 1, "train.precision = fp16"),
    ],
    "fully sharded units are updated after backward": [
        ("--shard.mode=zero3 --optim.when=backward --optim.clip_by=previous", 2, "optim.when = backward"),
        ("--shard.mode=zero3 --optim.clip_by=unit", 2, "optim.clip_by = unit"),
    ],
    "a shared gate has shared experts": [("--model.moe.shared_gate=true", 1, "model.moe.shared_ffn = 0")],
    "further tokens lie within the sequence": [
        ("--data.seq_len=4 --model.mtp=4", 1, "model.mtp = 4"),
        ("--data.seq_len=1 --model.mtp=2", 1, "data.seq_len = 1"),
    ],
    "the schedule takes vpp": [
        ("--pipeline.schedule=interleaved --parallel.pp=2", 2, "pipeline.vpp = 1"),
        ("--pipeline.schedule=zb_v --pipeline.vpp=3 --parallel.pp=2", 2, "pipeline.schedule = zb_v"),
    ],
    "the layout fits the model": [
        ("--pipeline.layout=Et|tttL --parallel.pp=4", 4, "expected pp x vpp = 4"),
        ("--pipeline.layout=Et|ttL --parallel.pp=2", 2, "1 missing; expected 4"),
        ("--pipeline.layout=Ett|Ltt --parallel.pp=2", 2, "stage 1 has t"),
        ("--pipeline.layout=Ett|ttx --parallel.pp=2", 2, "'x' as character 7"),
        ("--pipeline.layout=Edd|ttL --parallel.pp=2", 2, "calls layer 0 dense"),
        ("--pipeline.layout=Ettt|ttL --parallel.pp=2", 2, "1 too many"),
    ],
    "a vocabulary is trained on text": [
        ("--data.tokenizer=trained --data.source=zipf --model.vocab=999", 1, "data.source = zipf"),
        ("--data.tokenizer=trained --data.source=prepared --data.files=x --model.vocab=999", 1, "prepared"),
        (
            "--data.tokenizer=trained --data.format=pairs --data.source=files --data.files=x --model.vocab=999",
            1,
            "data.format = pairs",
        ),
    ],
    "a trained vocabulary has all bytes": [("--data.tokenizer=trained --model.vocab=256", 1, "model.vocab = 256")],
    "a trained vocabulary lies above its checkpoints": [
        ("--data.tokenizer=trained --model.vocab=999 --checkpoint.path=/x", 1, "checkpoint.path = /x")
    ],
    "there are pieces for all stages": [("--parallel.pp=4 --pipeline.vpp=2", 4, "= 8 stages")],
    "several stages need several ranks": [("--pipeline.vpp=2", 1, "pipeline.vpp = 2")],
}
CASES = [(rule, *spec) for rule in RULES for spec in BREAKS.get(rule.name, [])]
IDS = [f"{rule.name}, {words or 'as it is'}, {world} ranks" for rule, words, world, _ in CASES]


def changed(config: Config, words: str) -> Config:
    problems: dict[str, str] = {}
    config = with_values(config, parse_overrides(words.split()), problems)
    assert not problems, problems
    return config


def mended(fix: str, case: ConfigOnRanks) -> list[ConfigOnRanks]:
    """Every way to follow the advice, as the case it leads to."""
    if found := re.search(r"\((--\S+) \"\"\)", fix):
        return [ConfigOnRanks(with_values(case.config, parse_overrides([found[1], ""]), {}), case.world)]
    if found := re.match(r"set (\S+) x (\S+) to at most (\d+)", fix):
        return [ConfigOnRanks(changed(case.config, f"--{found[1]}=1 --{found[2]}={found[3]}"), case.world)]
    if found := re.match(r"set (\S+) to (\d+), or (\S+) to (\d+) or more", fix):
        return [ConfigOnRanks(changed(case.config, f"--{found[i]}={found[i + 1]}"), case.world) for i in (1, 3)]
    if "--" in fix:
        return [ConfigOnRanks(changed(case.config, fix[fix.index("--") :]), case.world)]
    if found := re.match(r"start a multiple of (\d+) ranks, or choose a product among ([\d, ]+)", fix):
        return [ConfigOnRanks(case.config, int(found[1]) * times) for times in (1, 2)]
    if several := several_ways(fix):
        return [ConfigOnRanks(changed(case.config, words), case.world) for words in several]
    found = re.match(r"set (\S+) (.*?)(;|$)", fix)
    assert found, f"cannot follow: {fix}"
    numbers = [float(n) if "." in n else int(n) for n in re.findall(r"(?<!\w)-?[\d.]+", found[2])]
    values = [numbers[0] + 1] if "above" in found[2] else numbers
    values += [2 * numbers[0]] if "multiple" in found[2] else []
    values = values or re.findall(r"\w+", found[2].removeprefix("to ").replace(" or ", " "))
    return [ConfigOnRanks(changed(case.config, f"--{found[1]}={value}"), case.world) for value in values]


NAMES = r"[a-z_.]+(?:(?:, | and )[a-z_.]+)*"
ASSIGNED = rf"({NAMES}) (to|above) (-?\w+)(?:, such as ([\w.]+))?"
WAY = re.compile(rf"{ASSIGNED}(?:,? and {ASSIGNED})*(?: to accept that)?")


def several_ways(fix: str) -> list[str]:
    """The overrides for each alternative of `set A.x to 1 and A.y to 2, or A.v, z above 0, such as 3`; a key may go
    without its section when that is the one named last. Nothing, if the advice is simpler than that."""
    keys, section = {key.path for key in iterate_keys(Config())}, ""
    ways: list[str] = []
    for way in fix.removeprefix("set ").split(", or "):
        words: list[str] = []
        if not WAY.fullmatch(way):
            return []
        for names, verb, value, example in re.findall(ASSIGNED, way):
            for name in re.split(", | and ", names):
                path = name if name in keys else section + name
                assert path in keys, f"{fix}: there is no key {name}"
                section = path.rpartition(".")[0] + "."
                words.append(f"--{path}={example or (int(value) + 1 if verb == 'above' else value)}")
        ways.append(" ".join(words))
    return ways if len(ways) > 1 or " " in ways[0] else []


def test_every_rule_is_broken_by_a_configuration_here():
    missing = {rule.name for rule in RULES} - set(BREAKS)
    assert not missing, f"add configurations that break the rules {missing} to BREAKS"


@pytest.mark.parametrize(("rule", "words", "world", "names"), CASES, ids=IDS)
def test_a_broken_rule_names_key_and_value_and_following_its_advice_mends_it(
    rule: ConfigRule, words: str, world: int, names: str
):
    case = ConfigOnRanks(changed(PRESETS["tiny"](), words), world)
    assert not rule.holds(case)
    assert names in rule.says(case)
    assert any(key.split(".")[-1] in rule.says(case) for key in rule.reads)
    for after in mended(rule.fix(case), case):
        assert rule.holds(after), f"{rule.fix(case)} does not help"
    with pytest.raises(UserError) as refused:
        check_config(case.config, world)
    assert f"{rule.says(case)}; {rule.fix(case)}" in refused.value.problems


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_reads_only_keys_that_exist(rule: ConfigRule):
    for path in rule.reads:
        node = Config()
        for name in path.split("."):
            node = getattr(node, name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_preset_holds_every_rule_on_the_usual_numbers_of_ranks(name: str, world: int):
    config = PRESETS[name]()
    if name == "tiny" and world == 8:
        config = changed(config, "--train.micro_batch=2")
    assert check_config(config, world) is config


def test_check_tells_all_broken_rules_at_once():
    config = changed(PRESETS["tiny"](), "--model.attention.kv_heads=3 --model.moe.top_k=9 --model.vocab=10")
    with pytest.raises(UserError) as refused:
        check_config(config)
    assert len(refused.value.problems) == 3


@settings(deadline=None)
@given(st.integers(1, 100_000))
def test_divisors_divide_and_are_all_when_few(n: int):
    found = [int(word) for word in divisors_in_words(n).split(", ")]
    every = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    every = sorted({*every, *(n // d for d in every)})
    assert found == every if len(every) <= 12 else set(found) < set(every)
    assert found == sorted(found)
    assert len(found) <= 12
    assert found[0] == 1
    assert found[-1] == n


def test_fewer_ranks_than_pipeline_stages_are_refused_whatever_else_reads_them():
    words = "--parallel.context_sizes=dynamic --parallel.context=all_to_all --parallel.pp=4"
    with pytest.raises(UserError, match="pp = 4 does not divide the number of ranks, 2"):
        check_config(changed(PRESETS["tiny"](), words), 2)


@pytest.mark.alone
def test_divisors_of_a_large_number_come_at_once():
    """A tenth of a second of the processor on a machine of usual speed."""
    assert least_seconds(seconds_of_divisors, 0.1) < 0.1


def seconds_of_divisors() -> float:
    begun = time.process_time()
    assert divisors_in_words(10**9)
    return time.process_time() - begun


HUGE = [
    f"--train.global_batch=1{'0' * 400} --train.micro_batch=7",
    f"--parallel.tp={'9' * 4000} --parallel.cp={'9' * 4000}",
]


@pytest.mark.parametrize("words", HUGE, ids=["a root that is no float", "a product of 8,000 digits"])
def test_numbers_beyond_reason_are_refused(words: str):
    with pytest.raises(UserError):
        resolve_recipe("tiny", words.split())
