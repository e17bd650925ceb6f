# SPDX-License-Identifier: BSD-3-Clause
"""Samples into packed micro-batches and back: packing, unpacking, and which samples go into which micro-batch."""
