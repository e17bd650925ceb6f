# SPDX-License-Identifier: BSD-3-Clause
"""Layers that carry something along the sequence, on packed rows: short convolutions, gated delta rule, Mamba-2.

`levels` says what lies where, `rows` moves rows and states, `mixers` computes with the functions of whoever made the
model, `known_bugs` says which of these are wrong.
"""
