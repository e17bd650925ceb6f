#!/usr/bin/env python
"""Measure attention over prefix trees against its peers, on the same tokens and in the same run.

    python benchmarks/bench_tree.py                                  # the five trees of trees.py
    python benchmarks/bench_tree.py --shape tree-comb --impls dualkv flex gathered
    python benchmarks/bench_tree.py --preset min_shared --impls dualkv_sm90  # from how many tokens on a node pays
    python benchmarks/bench_layer.py --preset tree                   # the agentic tree through a layer of Qwen3-8B
    python benchmarks/bench_model.py --preset tree --rounds 1 --limit-s 300   # and through Qwen3-1.7B

    dualkv      flash_attn_tree_varlen_func: every node stored once, one launch
    flex        FlexAttention with the tree's mask, on FlashAttention-4's kernels and on its own
    copied      the same where short nodes are not nodes: their tokens are in each of their children
    gathered    TRL's way: the keys and values of every node's path copied side by side by index_select, queries once
    flattened   the path of every leaf as a sequence of its own, in micro-batches of at most as many tokens as the tree
                has (256K where it has fewer); times are added, and the memory is that of the largest

TFLOP/s count visible (query, key) pairs of the tree, 4 H d operations per pair forward and 2.5 times that backward,
whatever an implementation computes. Times are medians of CUDA events. What cannot run has a row that says why.
"""

import sys
from functools import partial

import command
from peers import tree_implementations
from shapes import TREE_PRESETS, parse
from short_nodes import TreeRun, conclusion

BENCHMARK = command.Benchmark(
    name="tree",
    description=__doc__ or "",
    presets=TREE_PRESETS,
    default="trees",
    parse=parse,
    implementations=tree_implementations,
    run_type=TreeRun,
    conclusion=conclusion,
    lists_missing=True,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
