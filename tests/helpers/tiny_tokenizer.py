# SPDX-License-Identifier: BSD-3-Clause
"""A tokenizer whose words are the numbers of the tiny models' vocabulary."""

from __future__ import annotations

from typing import Any

import transformers
from tiny_models import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def tokenizer() -> Any:
    words = ["<pad>", "<bos>", "<eos>", *map(str, range(3, VOCABULARY))]
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
