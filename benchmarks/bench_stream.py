#!/usr/bin/env python
"""Measure what micro-batches cost beside their attention when no two have the same lengths.

    python benchmarks/bench_stream.py                      # 40 micro-batches of about 64K tokens in 64 samples
    python benchmarks/bench_stream.py --budget-s 300
    python benchmarks/bench_stream.py --impls dualkv flex_fa4

From the tokens of every sample, which are on the GPU, to the gradients of one attention layer's q, k and v, and the
values of response tokens by sample:

    this library    pack_shared_prompts (which finds the prompts that are the same, and makes positions and the layout),
                    attention, unpack_logprobs and its gradient
    FlexAttention   the tokens joined, tables of the mask, create_block_mask, attention, values padded and their
                    gradient; which samples share a prompt is known

create_block_mask and flex_attention are compiled with dynamic=True; "_static" compiles flex_attention anew for each
length, as dynamic=False does. A row is a micro-batch; two others come first, which load and compile:

    wall_ms         of all of that, the GPU idle before and done after
    attention_ms    of the attention's kernels, forward and backward: the same call again, several times, while the GPU
                    waits, so that no time of the host is in it; products in front give both times one clock
    ms              their difference: packing, mask, compilation, launches, unpacking
    host_ms         of the calls for packing, mask and unpacking alone, on the host
    device_ms       of what these launch on the GPU, in a profile of a second visit; the mean of all micro-batches
    graphs          that torch.compile made for this micro-batch
"""

import sys
from functools import partial

import command
from shapes import STREAMS
from stream import StreamRun, implementations, parse

BENCHMARK = command.Benchmark(
    name="stream",
    description=__doc__ or "",
    presets={name: (name,) for name in STREAMS},
    default="rl",
    parse=parse,
    implementations=implementations,
    run_type=StreamRun,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
