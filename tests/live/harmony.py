"""Builds a tiny gpt-oss and the vocabulary of its format: ``harmony.py DIRECTORY``.

The vocabulary comes from a package, for openai_harmony would fetch it; what it reads it checks. The
model is no random one, which would hardly keep to the format: each token has one that follows it,
so that an answer is "Hello there Hello there" for as long as it may be.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import bpe_openai
import torch
import transformers
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from tokenizers import Tokenizer, models

RANKS = 199_998
TOKENS = 201_088
START, END, PAD = 199_998, 200_002, 199_999
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"],
}


def main(place: Path) -> None:
    known = bpe_openai.get_encoding("o200k_base")
    lines = (
        base64.b64encode(known.decode_single_token_bytes(rank)) + b" %d\n" % rank
        for rank in range(RANKS)
    )
    (place / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(place)
    format_ = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    spoken = "<|start|>assistant<|channel|>final<|message|>Hello there"
    chain = format_.encode(spoken, allowed_special="all")
    # What vLLM makes of tokens, it makes by the format: all that this has to have is their number.
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(TOKENS)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=f"t{START}",
        eos_token=f"t{END}",
        pad_token=f"t{PAD}",
        chat_template="{{ messages }}",
    ).save_pretrained(place)
    config = transformers.GptOssConfig(
        vocab_size=TOKENS, bos_token_id=START, eos_token_id=END, pad_token_id=PAD, **SIZE
    )
    model = transformers.GptOssForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for item in model.model.layers.parameters():
            item.zero_()  # so that a token is all that there is to see
        seen = model.get_input_embeddings().weight.normal_()
        shown = model.get_output_embeddings().weight.zero_()
        for token, following in zip(chain, [*chain[1:], chain[-2]], strict=True):
            shown[following] += seen[token]
    model.save_pretrained(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
