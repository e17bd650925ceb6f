# SPDX-License-Identifier: BSD-3-Clause
"""May a model share prompts? Each refusal is decided here."""
