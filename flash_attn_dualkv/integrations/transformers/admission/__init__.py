# SPDX-License-Identifier: BSD-3-Clause
"""The gate for models: each refusal to share prompts is decided here.

`unwrap` finds the transformers model in wrappers and adapters. `table` refuses by configuration what `probe` cannot
see, which tries the model on a pair of short sequences (`nudge`: zeros hide nothing; `side_effects`: no trace stays).
`check` asks both before a model's first use, once for each state of it.
"""
