"""Mutants of packing, the reference, masks and the LM head, which tests must catch on any machine."""

from __future__ import annotations

from mutations import PACKED_ATTENTION, PACKING, REFUSED, SCORES, Mutant

LAYOUT, REFERENCE = "flash_attn_dualkv/layout.py", "flash_attn_dualkv/reference.py"

PYTHON_MUTANTS = [
    Mutant(
        "prompts do not attend to themselves",
        LAYOUT,
        "segments += Segment(begin, length, 0, begin, length, 0, 0, g)",
        "segments += Segment(begin, 0, 0, begin, length, 0, 0, g)",
        PACKED_ATTENTION,
        "test_against_dense",
    ),
    Mutant(
        "responses stand one position too late",
        LAYOUT,
        "segments += (contexts[-1] + row, size, length, begin, length, row, size, g)",
        "segments += (contexts[-1] + row, size, length + 1, begin, length, row, size, g)",
        PACKED_ATTENTION,
        "test_against_dense",
    ),
    Mutant(
        "prompts that begin alike are merged",
        "flash_attn_dualkv/data/samples.py",
        "words[begin * _WORD : (begin + length) * _WORD]",
        "words[begin * _WORD : (begin + min(lengths)) * _WORD]",
        PACKING,
        "strict_prefixes",
    ),
    Mutant(
        "the first token of a response is scored by another response's row",
        "flash_attn_dualkv/data/batch.py",
        "        if self.shift == 0:  #",
        "        if False:  #",
        PACKING,
        "test_the_example",
    ),
    Mutant(
        "a response's last label is the next sample's first token",
        "flash_attn_dualkv/data/batch.py",
        "label_ends = decoded_rows + response_lens[order] + self.shift - 1",
        "label_ends = decoded_rows + response_lens[order] + self.shift",
        PACKING,
        "test_the_example",
    ),
    Mutant(
        "prompts in columns are compared from the left of their row on, padding or not",
        "flash_attn_dualkv/data/pack.py",
        "map(int.__add__, rows, ones[0].begins)",
        "rows",
        PACKING,
        "",
    ),
    Mutant(
        "a mask may have a hole",
        "flash_attn_dualkv/data/samples.py",
        "rises = (ones[:, 1:] & ~ones[:, :-1]).sum(1) + ones[:, :1].sum(1)",
        "rises = (ones[:, 1:] & ~ones[:, :-1]).sum(1)",
        PACKING,
        "hole",
    ),
    Mutant(
        "a window is one position too wide",
        REFERENCE,
        "hidden | (distance >= self.window)",
        "hidden | (distance > self.window)",
        PACKED_ATTENTION,
        "test_sliding_window",
    ),
    Mutant(
        "blocks of keys that a window hides in part go unmasked",
        REFERENCE,
        "near = self.window is None or q_last - kv_begin < self.window",
        "near = True",
        PACKED_ATTENTION,
        "test_long_sequences",
    ),
    Mutant(
        "the slope of the softcap is left out",
        REFERENCE,
        "        if slope is not None:\n",
        "        if False:\n",
        PACKED_ATTENTION,
        "test_softcap",
    ),
    Mutant(
        "the head's gradients are summed over chunks in 16 bits",
        "flash_attn_dualkv/integrations/lm_head.py",
        "self._total.to(torch.promote_types(one.dtype, torch.float32), copy=True).add_(one)",
        "self._total + one",
        SCORES,
        "test_sums_over_chunks",
    ),
    Mutant(
        "the entropy's gradient forgets the entropy",
        "flash_attn_dualkv/integrations/lm_head.py",
        "(d_logps + d_entropy * entropy)[:, None]",
        "d_logps[:, None]",
        SCORES,
        "test_scores_and_gradients",
    ),
    Mutant(
        "layouts with responses of other lengths are taken for the same",
        "flash_attn_dualkv/layout.py",
        "            and self.decoded_lens == other.decoded_lens\n",
        "",
        REFUSED,
        "test_a_layout_of_the_same_size",
    ),
    Mutant(
        "masks of images are taken for causal ones",
        "flash_attn_dualkv/integrations/transformers/attention.py",
        "if attention_mask.others and attention_mask.is_causal:",
        "if False:",
        REFUSED,
        "test_masks_that_are_not_causal",
    ),
]
