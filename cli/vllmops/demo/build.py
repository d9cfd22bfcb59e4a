"""Builds one demo model: ``python -m vllmops.demo.build vision DIRECTORY``.

A process of its own, so that the command line imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from . import DemoKind

BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
IMAGE, AROUND_IMAGE, GLOBAL_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
LINES = ["The quick brown fox jumps over the lazy dog.", "What is in this picture? A cat, I think."]
VOCABULARY = 512  # besides the special tokens
IMAGE_PIXELS, PATCH_PIXELS, IMAGE_SCALE = 28, 7, 2
# An image part of a message is the image token, everything else its text.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT_SIZE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def train_tokenizer(special_tokens: Sequence[str], **roles: str) -> Any:
    """A byte-level BPE tokenizer trained on a few lines; it can write down any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + len(special_tokens),
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(LINES * 5, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, additional_special_tokens=list(special_tokens), **roles
    )
    made.chat_template = TEMPLATE
    return made


def build_text_model(model_folder: Path) -> None:
    """Qwen2."""
    words = train_tokenizer([BOS, EOS, PAD], bos_token=BOS, eos_token=EOS, pad_token=PAD)
    words.save_pretrained(model_folder)
    config = transformers.Qwen2Config(
        vocab_size=len(words), **TEXT_SIZE, **collect_token_ids(words)
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(model_folder)


def build_moe_model(model_folder: Path) -> None:
    """Mixtral."""
    words = train_tokenizer([BOS, EOS, PAD], bos_token=BOS, eos_token=EOS, pad_token=PAD)
    words.save_pretrained(model_folder)
    config = transformers.MixtralConfig(
        vocab_size=len(words), num_local_experts=4, **TEXT_SIZE, **collect_token_ids(words)
    )
    transformers.MixtralForCausalLM(config).save_pretrained(model_folder)


def build_vision_model(model_folder: Path) -> None:
    """Idefics3; an image is one tile of 4 tokens."""
    # The processor asks for the tokens of a split image, though this one never splits.
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = train_tokenizer(
        [BOS, EOS, PAD, IMAGE, AROUND_IMAGE, GLOBAL_IMAGE, "<end_of_utterance>", *tiles],
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
    )
    edge = {"longest_edge": IMAGE_PIXELS}
    images = transformers.Idefics3ImageProcessor(
        do_image_splitting=False, do_resize=True, size=edge, max_image_size=edge
    )
    transformers.Idefics3Processor(
        image_processor=images,
        tokenizer=words,
        image_seq_len=(IMAGE_PIXELS // PATCH_PIXELS) ** 2 // IMAGE_SCALE**2,
        chat_template=TEMPLATE,
    ).save_pretrained(model_folder)
    config = transformers.Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            **TEXT_SIZE,
            **collect_token_ids(words),
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
        image_token_id=words.convert_tokens_to_ids(IMAGE),
        scale_factor=IMAGE_SCALE,
        pad_token_id=words.pad_token_id,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.save_pretrained(model_folder)


def build_audio_model(model_folder: Path) -> None:
    """Whisper."""
    # All of them: asked without a language, vLLM takes the likeliest of those it knows.
    languages = [f"<|{code}|>" for code in LANGUAGES]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    others = ["<|nospeech|>", "<|notimestamps|>"]
    stamps = [f"<|{second * 0.02:.2f}|>" for second in range(1501)]
    end, start = "<|endoftext|>", "<|startoftranscript|>"
    special = [end, start, *languages, *tasks, *others, *stamps]
    bpe = train_tokenizer(special).backend_tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        bpe.model.save(scratch)
        words = transformers.WhisperTokenizerFast(
            tokenizer_object=bpe,
            vocab_file=f"{scratch}/vocab.json",
            merges_file=f"{scratch}/merges.txt",
            additional_special_tokens=special[1:],
            unk_token=end,
            bos_token=end,
            eos_token=end,
        )
        features = transformers.WhisperFeatureExtractor(feature_size=80)
        transformers.WhisperProcessor(features, words).save_pretrained(model_folder)
    number = words.convert_tokens_to_ids
    config = transformers.WhisperConfig(
        vocab_size=len(words),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        bos_token_id=number(end),
        eos_token_id=number(end),
        pad_token_id=number(end),
        decoder_start_token_id=number(start),
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        # The likeliest token would be a special one for ever, and every transcript empty.
        model.get_output_embeddings().weight[number(special)] = 0
    model.save_pretrained(model_folder)


def collect_token_ids(tokenizer: Any) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


RECIPES: dict[DemoKind, Callable[[Path], None]] = {
    DemoKind.TEXT: build_text_model,
    DemoKind.MOE: build_moe_model,
    DemoKind.VISION: build_vision_model,
    DemoKind.AUDIO: build_audio_model,
}


def main() -> None:
    """Build into a directory beside, and rename: a build that breaks off leaves no model."""
    kind, place = DemoKind(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        RECIPES[kind](scratch)
        try:
            os.rename(scratch, place)
        except OSError:
            if not (place / "config.json").is_file():  # else somebody else was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
