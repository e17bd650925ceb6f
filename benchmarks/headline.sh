#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Makes the README's table anew, and the pages of attention, trees and streams behind it, on one
# Hopper GPU in about 20 minutes, beside the strongest peers. They are installed before:
#     pip install nvidia-cudnn-frontend flash-attn-4
#     benchmarks/headline.sh           results in benchmarks/results/<gpu>, and report.py's pages
#     benchmarks/headline.sh FOLDER    results in FOLDER
# Every line is one process, so that its ratios are; a budget ends it with what there is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
where=(${1:+--out "$1"}) status=0
bench() { # NAME SCRIPT BUDGET ARGUMENTS...
    python "benchmarks/$2.py" --name "$1" --budget-s "$3" "${where[@]}" "${@:4}" || status=1
}
bench kernel-deterministic bench_kernel 90 --impls =dualkv_sm90_deterministic =cudnn_flex =cudnn_flex_deterministic \
    --shape 28x4Kx2K 28x16Kx2K 16-groups-of-8x256x131-2048 --rounds 3
bench kernel-shared bench_kernel 240 --impls =cudnn_flex =flex_fa4 =fa4_replicated --shape 28x16Kx2K 16x8Kx131-2048 \
    32x8Kx32-256 16-groups-of-8x256x131-2048 28x4Kx2K 32x5059x131-2048
bench tree bench_kernel 220 --impls =cudnn_flex =flex_fa4 fa4_gathered fa4_flattened --shape tree-branched tree-comb \
    tree-balanced_d4 tree-agentic_wide tree-agentic
bench layer bench_layer 90 --impls =cudnn_flex =flex_fa4 =fa4_replicated --shape 16x8Kx131-2048
bench stream bench_stream 300 --impls =cudnn_flex =flex_fa4
bench model trainers/bench_model 250 --impls =cudnn_flex =flex_fa4 =fa4_replicated --shape 16x8Kx131-2048 --rounds 1
[[ -n ${1:-} ]] || python benchmarks/report.py || status=1
exit $status
