"""Small real tokenizers, trained or written here: byte-level BPE, and the SentencePiece style with byte fallback."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.engine.tokenizer import HFTokenizer

TEXTS = [
    'The quick brown fox jumps over the lazy dog. {"name": "fox", "count": 3, "tags": [true, null]}',
    "Stop here. 你好世界。今天天气很好。 Привет, мир! Grüße aus Köln.",
    "emoji 🦊🐕‍🦺👩🏽‍💻 and combining e\u0301 a\u0308 letters",
]
END, TURN = "<|end|>", "<|turn|>"


def write_byte_level(folder: Path, **config: object) -> HFTokenizer:
    """256 bytes, two special tokens and some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return _write(folder, tokenizer, config)


def write_byte_fallback(folder: Path, **config: object) -> HFTokenizer:
    """Pieces with a mark for spaces; what is not in the vocabulary goes byte by byte; the first space is dropped."""
    pieces = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += sorted({char for text in TEXTS[:1] for char in text if char != " "})
    merges = [("\u2581", "T"), ("h", "e"), ("\u2581T", "he"), ("o", "x"), ("\u2581", "f"), ("\u2581f", "ox")]
    pieces += ["".join(pair) for pair in merges]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", END])
    return _write(folder, tokenizer, config)


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> HFTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} | config))
    return HFTokenizer(folder)
