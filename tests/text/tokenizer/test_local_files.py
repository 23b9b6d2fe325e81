"""Tokenizers by name: from the caches that other libraries keep, and never from the network unasked."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import huggingface_hub
import pytest
import tiktoken
import tiktoken_ext.openai_public
from huggingface_hub.utils import EntryNotFoundError
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

from locant.errors import InputError
from locant.text import Tokenizer, sample_text
from locant.text.tokenizer import local_files
from locant.text.tokenizer.local_files import ENCODINGS, cached_encoding, cached_name
from tests.refusal import refuses

REMEDIES = (r"the path of a tokenizer\.json", "download=True", r"trained on your own text")
VARIABLES = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that holds nothing, so that no test sees the caches of the person who runs it."""
    folder = tmp_path_factory.mktemp("home")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / ".cache/huggingface/hub"))
    monkeypatch.setattr(local_files.socket, "create_connection", lambda place, timeout: socket.socket())  # it answers
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    return folder


@functools.cache
def a_tokenizer(seed: int = 0) -> Tokenizer:
    return Tokenizer.train(sample_text()[seed * 1000 :][:3000], 300)


def in_hub_cache(
    cache: Path, name: str, tokenizer: Tokenizer, commit: str = "c0ffee", main: str | None = "c0ffee"
) -> Path:
    """As the Hugging Face libraries lay it out: a link in a snapshot to a blob, and what `main` stands for."""
    folder = cache / ("models--" + name.replace("/", "--"))
    blob = folder / "blobs" / tokenizer.fingerprint
    snapshot = folder / "snapshots" / commit
    for place in (blob.parent, snapshot, folder / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    tokenizer.save(blob)
    (snapshot / "tokenizer.json").symlink_to(Path("../../blobs") / blob.name)
    if main is not None:
        (folder / "refs" / "main").write_text(main)
    return folder


class TestAPath:
    def test_may_be_a_file_or_a_folder_as_str_or_path(self, tmp_path: Path) -> None:
        tokenizer = a_tokenizer()
        tokenizer.save(tmp_path / "tokenizer.json")
        tokenizer.save(tmp_path / "other name")
        for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "other name"):
            assert Tokenizer.load(path).fingerprint == Tokenizer.load(str(path)).fingerprint == tokenizer.fingerprint

    def test_comes_before_a_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        in_hub_cache(home / ".cache/huggingface/hub", "gpt2", a_tokenizer(1))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gpt2").mkdir()
        a_tokenizer(2).save(tmp_path / "gpt2")
        assert Tokenizer.load("gpt2").fingerprint == a_tokenizer(2).fingerprint

    def test_that_is_not_there_is_not_looked_up_as_a_name(self, home: Path) -> None:
        in_hub_cache(home / ".cache/huggingface/hub", "gpt2", a_tokenizer())
        assert Tokenizer.load("gpt2").vocab_size == 300
        with pytest.raises(InputError, match="found no tokenizer 'gpt2'"):
            Tokenizer.load(Path("gpt2"), download=True)

    def test_of_a_folder_without_one_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"which holds no tokenizer\.json; try: "):
            Tokenizer.load(tmp_path)


class TestAFolderOfGPT2:
    """`encoder.json` and `vocab.bpe`, as OpenAI published them: spellings with ids, and merges under a version."""

    @pytest.fixture
    def gpt2(self, tmp_path: Path) -> Path:
        made = json.loads(Tokenizer.train(sample_text()[:60_000], 600).to_json())["model"]
        vocab = made["vocab"] | {"<|endoftext|>": len(made["vocab"])}
        (tmp_path / "encoder.json").write_text(json.dumps(vocab))
        merges = "".join(" ".join(pair) + "\n" for pair in made["merges"])
        (tmp_path / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
        return tmp_path

    def test_gives_the_ids_of_the_tokenizer_of_transformers(self, gpt2: Path) -> None:
        ours, text = Tokenizer.load(gpt2), sample_text()[100_000:110_000] + " isn't  né 日本\n\n x"
        vocab = json.loads((gpt2 / "encoder.json").read_text())
        merges = [tuple(line.split()) for line in (gpt2 / "vocab.bpe").read_text("utf-8").splitlines()[1:]]
        theirs = GPT2Tokenizer(vocab=vocab, merges=merges)
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
        assert (ours.vocab_size, ours.end_of_text) == (len(vocab), vocab["<|endoftext|>"])
        assert ours.lossless

    def test_is_read_where_there_is_no_tokenizer_json(self, gpt2: Path) -> None:
        a_tokenizer().save(gpt2)
        assert Tokenizer.load(gpt2).fingerprint == a_tokenizer().fingerprint

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("encoder.json", "[]", "encoder.json is not a JSON object"),
            ("encoder.json", '{"a": 0}', "is not a tokenizer that the tokenizers library can read"),
            ("encoder.json", None, r"holds no tokenizer\.json; try: .* or with encoder\.json and vocab\.bpe"),
            ("vocab.bpe", "", "is empty"),
            ("vocab.bpe", "#version: 0.2\nq zqzq\n", "is not a tokenizer"),
            ("vocab.bpe", "#version: 0.2\nabc\n", "is not a tokenizer"),
        ],
    )
    def test_that_is_damaged_is_refused(self, name: str, content: str | None, said: str, gpt2: Path) -> None:
        if content is None:
            (gpt2 / name).unlink()
        else:
            (gpt2 / name).write_text(content)
        with pytest.raises(InputError, match=said):
            Tokenizer.load(gpt2)


class TestAModelOfSentencePiece:
    @pytest.fixture(autouse=True)
    def _temporary_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def test_is_answered_with_how_to_convert_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
        (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
        for path in (tmp_path, tmp_path / "tokenizer.model"):
            with refuses(InputError, "sentencepiece is not installed", f"from_pretrained({str(tmp_path)!r})"):
                Tokenizer.load(path)

    @pytest.mark.parametrize("first_line", ["word v1", "BoundlessBPE v2 boundless"])
    def test_is_not_what_boundless_bpe_saves(self, tmp_path: Path, first_line: str) -> None:
        (tmp_path / "tokenizer.model").write_text(f'{first_line}\n" ?[a-z]+"\n3\n0 a\n1 b\n2 ab\n')
        for path in (tmp_path, tmp_path / "tokenizer.model"):
            with refuses(InputError, "BoundlessBPE", "export_huggingface"):
                Tokenizer.load(path)

    def test_gives_the_ids_of_sentencepiece(self, tmp_path: Path) -> None:
        sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece trains and reads such a model")
        text, prefix = sample_text()[:200_000], tmp_path / "tokenizer"
        (tmp_path / "text.txt").write_text(text)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text.txt"), model_prefix=str(prefix), vocab_size=500, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
        expected = sentencepiece.SentencePieceProcessor(f"{prefix}.model")
        for path in (tmp_path, tmp_path / "tokenizer.model"):
            tokenizer = Tokenizer.load(path)
            for one in ("hello  world", " the cat", "né 日本", text[:5000].replace("\n", " ")):
                assert tokenizer.encode(one).tolist() == expected.encode(one)

    def test_that_is_damaged_is_refused(self, tmp_path: Path) -> None:
        pytest.importorskip("sentencepiece", reason="without it nothing is read")
        (tmp_path / "tokenizer.model").write_bytes(b"no model at all")
        with refuses(InputError, "transformers cannot convert"):
            Tokenizer.load(tmp_path)


class TestANameThatIsNowhere:
    @pytest.mark.parametrize("name", ["gpt2", "someone/something", "cl100k_base", "a\0b", "x" * 5000, "../up"])
    def test_names_the_three_remedies_and_where_it_was_looked_for(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tk"))
        with pytest.raises(InputError) as caught:
            Tokenizer.load(name)
        assert all(re.search(remedy, caught.value.remedy) for remedy in REMEDIES)
        if name == "gpt2":
            assert str(tmp_path / "hf") in caught.value.cause
            assert str(tmp_path / "tk") in caught.value.cause

    def test_is_not_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite lets nobody onto the network; and the door that would be used is not even touched."""

        def fetch(*arguments: object, **options: object) -> str:
            raise AssertionError("fetched")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
        with pytest.raises(InputError):
            Tokenizer.load("gpt2")
        with pytest.raises(AssertionError, match="fetched"):
            Tokenizer.load("gpt2", download=True)


class TestTheHubCache:
    @pytest.mark.slow
    def test_is_where_its_own_library_looks(self, tmp_path: Path) -> None:
        """The library reads its variables when it is imported."""
        in_hub_cache(tmp_path / "hub", "someone/something", a_tokenizer())
        code = "from locant import Tokenizer; print(Tokenizer.load('someone/something').fingerprint)"
        environment = {**os.environ, "HF_HOME": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == a_tokenizer().fingerprint

    def test_is_read_at_the_revision_that_main_stands_for(self, home: Path) -> None:
        cache = home / ".cache/huggingface/hub"
        in_hub_cache(cache, "gpt2", a_tokenizer(1), "old", main=None)
        in_hub_cache(cache, "gpt2", a_tokenizer(2), "new", main="new")
        assert Tokenizer.load("gpt2").fingerprint == a_tokenizer(2).fingerprint
        (cache / "models--gpt2" / "refs" / "main").write_text("old")
        assert Tokenizer.load("gpt2").fingerprint == a_tokenizer(1).fingerprint
        (cache / "models--gpt2" / "refs" / "main").write_text("neither")
        with pytest.raises(InputError, match="found no tokenizer 'gpt2'"):
            Tokenizer.load("gpt2")

    def test_without_main_has_its_only_revision(self, home: Path) -> None:
        folder = in_hub_cache(home / ".cache/huggingface/hub", "gpt2", a_tokenizer(1), "one", main=None)
        assert Tokenizer.load("gpt2").fingerprint == a_tokenizer(1).fingerprint
        in_hub_cache(folder.parent, "gpt2", a_tokenizer(2), "two", main=None)
        with pytest.raises(InputError, match=r"got 2 revisions in .*; try: pass the path of one"):
            Tokenizer.load("gpt2")

    def test_holds_the_first_models_under_their_new_owners(self, home: Path) -> None:
        in_hub_cache(home / ".cache/huggingface/hub", "openai-community/gpt2", a_tokenizer(1))
        in_hub_cache(home / ".cache/huggingface/hub", "someone/gpt3", a_tokenizer(2))
        assert Tokenizer.load("gpt2").fingerprint == a_tokenizer(1).fingerprint
        with pytest.raises(InputError):
            Tokenizer.load("gpt3")


class TestDownloading:
    def test_is_done_when_asked_for_and_only_for_what_is_not_there(
        self, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def fetch(name: str, file: str) -> str:
            asked.append((name, file))
            a_tokenizer(3).save(tmp_path / "fetched.json")
            return str(tmp_path / "fetched.json")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
        assert Tokenizer.load("someone/something", download=True).fingerprint == a_tokenizer(3).fingerprint
        assert asked == [("someone/something", "tokenizer.json")]
        in_hub_cache(home / ".cache/huggingface/hub", "someone/something", a_tokenizer(1))
        assert Tokenizer.load("someone/something", download=True).fingerprint == a_tokenizer(1).fingerprint
        assert len(asked) == 1

    @pytest.mark.parametrize(
        "error", [OSError("no route\nto host"), ValueError("bad name"), EntryNotFoundError("404"), OSError()]
    )
    def test_that_fails_says_why(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str, file: str) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
        why = str(error).splitlines()[0] if str(error) else "OSError"
        with pytest.raises(
            InputError, match=f"cannot download tokenizer.json of 'gpt2': {why}; try: pass a name on the hub"
        ):
            Tokenizer.load("gpt2", download=True)

    @pytest.mark.parametrize(
        ("endpoint", "proxies", "asked"),
        [
            ("https://hub.example", {}, [("hub.example", 443)]),
            ("http://hub.example/there", {}, [("hub.example", 80)]),
            ("http://hub.example:8080", {}, [("hub.example", 8080)]),
            ("https://hub.example", {"https": "http://proxy.example"}, []),  # which alone reaches it
        ],
    )
    def test_is_given_up_where_nothing_answers(
        self, endpoint: str, proxies: dict[str, str], asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places, fetched = [], []

        def nobody(place: tuple[str, int], timeout: float) -> None:
            places.append(place)
            raise TimeoutError("timed out")

        def fetch(name: str, file: str) -> str:
            fetched.append(name)
            raise OSError("timed out")

        monkeypatch.setattr(local_files.socket, "create_connection", nobody)
        monkeypatch.setattr(local_files, "getproxies", lambda: proxies)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        with pytest.raises(InputError, match=r"cannot download tokenizer\.json of 'gpt2': timed out;"):
            Tokenizer.load("gpt2", download=True)
        assert places == asked
        assert fetched == ([] if asked else ["gpt2"])


TELLING = " \n\r\t/'!x1Sd"


def small_ranks() -> dict[bytes, int]:
    """Ranks as `tiktoken` has them, learned here: bytes first, in GPT-2's order, then what they merge to.

    After them come tokens that tell where words begin and end, by merging across, and one that nothing merges to.
    """
    learned = Tokenizer.train(sample_text()[:60_000], 600, special_tokens=())
    tokens = [learned.decode_bytes([number]) for number in range(learned.vocab_size)]
    letters = [letter.encode() for letter in TELLING]
    telling = [b"".join(pair) for size in (2, 3) for pair in itertools.product(letters, repeat=size)]
    return {token: rank for rank, token in enumerate(dict.fromkeys([*tokens, *telling, b"zqxjk"]))}


RANKS = small_ranks()


def as_tiktoken_file(table: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items())


def published(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, data: bytes, file: int = 0) -> Path:
    """Lay a file into the cache as `tiktoken` would, and take it for the published one."""
    wanted = [*ENCODINGS[name].files][file]
    files = {**ENCODINGS[name].files, wanted: hashlib.sha256(data).hexdigest()}
    special = {spelling: number - 40_000 for spelling, number in ENCODINGS[name].special_tokens.items()}
    small = dataclasses.replace(ENCODINGS[name], files=files, special_tokens=special)
    monkeypatch.setitem(local_files.ENCODINGS, name, small)
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / cached_name(wanted)
    path.write_bytes(data)
    return path


def theirs_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """`tiktoken`'s own encoding of this name: its pattern and special tokens, over our few tiktoken_files."""
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: RANKS)
    monkeypatch.setattr(tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **_: RANKS)
    made = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    special = {spelling: number - 40_000 for spelling, number in made["special_tokens"].items()}
    return tiktoken.Encoding(name, pat_str=made["pat_str"], mergeable_ranks=RANKS, special_tokens=special)


NAMES = ["gpt2", "r50k_base", "cl100k_base", "o200k_base"]
LETTERS = "the cat isn't HERE, we'll DON'T'S 0123456789 \n\r\t\u3000éÉßǅʰ日本語🙂́<|>/x-"


class TestTheTiktokenCache:
    @pytest.mark.parametrize("name", NAMES)
    def test_gives_the_ids_of_tiktoken(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        published(monkeypatch, tmp_path, name, as_tiktoken_file(RANKS))
        ours, theirs = Tokenizer.load(name), theirs_of(name, monkeypatch)
        assert ours.special_tokens == theirs._special_tokens
        assert ours.vocab_size == theirs.n_vocab
        assert ours.end_of_text == theirs.eot_token
        assert ours.lossless

        @given(
            text=st.text(st.sampled_from(LETTERS), max_size=80) | st.text(st.sampled_from(" \n\r\tx1'S/!"), max_size=12)
        )
        @example("a  \nb  ")
        @example("a\n  ")
        @example("zqxjk")
        @example("x!/\n1")
        def same(text: str) -> None:
            assert ours.encode(text).tolist() == theirs.encode(text, disallowed_special=())

        same()
        text = sample_text()[200_000:260_000]
        assert ours.encode(text).tolist() == theirs.encode(text, disallowed_special=())
        text = "a<|endoftext|>b"
        assert ours.encode(text).tolist() == theirs.encode(text, disallowed_special=())
        allowed = ours.encode(text, allowed_special=ours.special_tokens).tolist()
        assert allowed == theirs.encode(text, allowed_special="all")

    @pytest.mark.parametrize("name", NAMES)
    def test_files_have_the_name_and_the_hash_that_tiktoken_expects(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = {}

        def ask(path: str, expected_hash: str | None = None, **options: str) -> dict[bytes, int]:
            asked[hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()] = expected_hash
            return {}

        monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", ask)
        monkeypatch.setattr(
            tiktoken_ext.openai_public,
            "data_gym_to_mergeable_bpe_ranks",
            lambda **options: ask(options["vocab_bpe_file"], options["vocab_bpe_hash"]),
        )
        tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
        assert asked.items() <= {cached_name(path): sha256 for path, sha256 in ENCODINGS[name].files.items()}.items()

    def test_may_hold_gpt_2_as_it_was_first_published(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Merges in the letters of byte-level vocabularies, from which the ranks follow."""
        made = Tokenizer.train(sample_text()[:60_000], 600, special_tokens=())
        model = json.loads(made.to_json())["model"]
        data = "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"])
        published(monkeypatch, home / "tmp" / "data-gym-cache", "gpt2", data.encode(), file=1)
        assert model["vocab"].items() <= cached_encoding("gpt2")["model"]["vocab"].items()
        text = sample_text()[100_000:110_000]
        assert Tokenizer.load("gpt2").encode(text).tolist() == made.encode(text).tolist()

    @pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", None])
    def test_is_where_tiktoken_keeps_it(
        self, variable: str | None, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path if variable else home / "tmp" / "data-gym-cache"
        if variable:
            monkeypatch.setenv(variable, str(tmp_path))
        published(monkeypatch, folder, "cl100k_base", as_tiktoken_file(RANKS))
        assert Tokenizer.load("cl100k_base").special_tokens["<|endoftext|>"] == 60257

    def test_may_be_switched_off(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        published(monkeypatch, home / "tmp" / "data-gym-cache", "gpt2", as_tiktoken_file(RANKS))
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
        monkeypatch.chdir(home / "tmp" / "data-gym-cache")
        with pytest.raises(InputError, match="found no tokenizer 'gpt2'"):
            Tokenizer.load("gpt2")

    def test_comes_after_the_hub_cache(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        published(monkeypatch, home / "tmp" / "data-gym-cache", "gpt2", as_tiktoken_file(RANKS))
        assert Tokenizer.load("gpt2").vocab_size == 10257
        in_hub_cache(home / ".cache/huggingface/hub", "gpt2", a_tokenizer())
        assert Tokenizer.load("gpt2").vocab_size == 300

    def test_with_another_file_under_that_name_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = published(monkeypatch, home / "tmp" / "data-gym-cache", "gpt2", as_tiktoken_file(RANKS))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            InputError, match=r"is not encodings/r50k_base.tiktoken as it was published; try: delete it"
        ):
            Tokenizer.load("gpt2")
