#!/usr/bin/env python3
"""Token ids of examples/generate against llama.cpp's: the vocabulary files in llama.cpp's sources with seeded random texts.

    test_vocabularies.py                   fetches the sources, and runs the test of examples/generate that compares
    test_vocabularies.py --encode FOLDER   what that test runs: writes vocabularies to a folder, and encodes texts with each

The vocabularies are those of llama.cpp's models/ggml-vocab-*.gguf that are BPE or SentencePiece, and one of them once more for each
name of a pre-tokenizer that llama-vocab.cpp has. --encode prints a line of JSON for each text: the file, the text and the ids.
"""
import argparse
import json
import random
import re
import struct
import sys
from pathlib import Path

TEXTS = 500  # of each vocabulary
TEXTS_OF_NAME = 200  # of each name of a pre-tokenizer
# LLAMA_TOKEN_ATTR_UNKNOWN, CONTROL and USER_DEFINED.
SPECIAL = 1 | 8 | 16
# The vocabulary that has the texts of all names: 150,000 tokens of many languages.
BASE = "ggml-vocab-qwen2.gguf"
# Of embedding models, whose vocabularies are encoded in another way.
EXCLUDED = {"whitespace"}
PRE = b"tokenizer.ggml.pre"

WORDS = """the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word but
    not what all were we when your can said there use an each which she do how their if will up other about out many then them
    don't it's we'll I've they're he'd I'm HE'S WE'LL Hello World capital France Paris print(x) return None int main() {} for(i=0;i<10;++i)
    über Straße café naïve Ελληνικά кириллица слово Ёлка İstanbul ñandú Þórr ǅ ﬁ""".split()
OTHERS = """日本語 中文字符 漢字かな混じり カタカナ 한국어 안녕하세요 ㄱㄴ ㄅㄆ العربية שלום हिन्दी नमस्ते বাংলা ไทยภาษา ລາວ ខ្មែរ မြန်မာ தமிழ் తెలుగు 🦀 🎉👍🏽 👨‍👩‍👧
    ☃ → ∑ ½ ² Ⅷ ٣٤ १२ ①② € £ ¥ © “quoted” ‘x’ … — ！？：；， 、。 〇 𝔘𝔫𝔦 𠀀𠀁 豈 e\u0301 a\u0308\u0301 \u0301 \u200b \u200d \ufeff \u00a0 \u3000 \u2028 \u0085""".split(" ")
SPACES = [" ", " ", " ", "  ", "   ", "    ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", " \n \n  ", "\u00a0", "\u3000", "\x0b", "\x0c", " " * 17]
MARKS = list("""!"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~""") + ["...", "!!!", "?!", "--", "==", "::", "->", "=>", "//", "/*", "*/", "'s", "'LL", "'t"]


def texts(count, seed, special):
    """Seeded texts, some with the texts of special tokens."""
    rng = random.Random(seed)

    def part():
        kind = rng.random()
        if kind < 0.35:
            return rng.choice(WORDS)
        if kind < 0.5:
            return rng.choice(OTHERS)
        if kind < 0.75:
            return rng.choice(SPACES)
        if kind < 0.85:
            return "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 9)))
        if kind < 0.95 or not special:
            return rng.choice(MARKS)
        return rng.choice(special)

    return ["".join(part() for _ in range(rng.randrange(0, 24))) for _ in range(count)]


def with_pre(data, name):
    """The bytes of a file without tensors, with another name of its pre-tokenizer."""
    at = data.index(struct.pack("<Q", len(PRE)) + PRE) + 8 + len(PRE) + 4
    (length,) = struct.unpack_from("<Q", data, at)
    return data[:at] + struct.pack("<Q", len(name)) + name + data[at + 8 + length :]


def vocabularies(models, folder):
    """Files with the number of texts to encode."""
    for path in sorted(models.glob("ggml-vocab-*.gguf")):
        yield path, TEXTS
    base = (models / BASE).read_bytes()
    source = (models.parent / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    for name in dict.fromkeys(re.findall(r'tokenizer_pre == "([^"]+)"', source)):
        if name not in EXCLUDED:
            path = folder / f"pre-{name}.gguf"
            path.write_bytes(with_pre(base, name.encode()))
            yield path, TEXTS_OF_NAME


def encode(folder):
    import llama_cpp

    from servers import ROOT
    from upstream import archive

    folder.mkdir(parents=True, exist_ok=True)
    log = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(log, None)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    specials = {}
    for path, count in vocabularies(archive(ROOT / "target/upstream") / "models", folder):
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, f"llama.cpp refuses {path}"
        vocab = llama_cpp.llama_model_get_vocab(model)
        if llama_cpp.llama_vocab_type(vocab) in (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE):
            source = path.name if count == TEXTS else BASE
            if source not in specials:
                ids = range(llama_cpp.llama_vocab_n_tokens(vocab))
                special = [id for id in ids if llama_cpp.llama_vocab_get_attr(vocab, id) & SPECIAL]
                specials[source] = [llama_cpp.llama_vocab_get_text(vocab, id).decode(errors="replace") for id in special]
            for text in texts(count, path.name, specials[source]):
                data = text.encode()
                ids = (llama_cpp.llama_token * (len(data) + 16))()
                found = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)
                assert found >= 0
                print(json.dumps({"file": str(path), "text": text, "ids": ids[:found]}))
        llama_cpp.llama_model_free(model)


def compare():
    from servers import ROOT
    from upstream import run_unit_test

    test = "tokenizer::tests::vocabularies_of_a_folder_have_the_token_ids_of_llama_cpp"
    sys.exit(run_unit_test(test, FANOUT_VOCABULARIES=str(ROOT / "target/upstream/vocabularies")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encode", type=Path, metavar="FOLDER", help="write vocabularies to the folder, and print texts and ids")
    folder = parser.parse_args().encode
    encode(folder) if folder else compare()


if __name__ == "__main__":
    main()
