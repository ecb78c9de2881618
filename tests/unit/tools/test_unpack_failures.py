"""What stops unpacking is one sentence that names the path, and exit code 3."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.environments import install
from tests.support.packing import PYTHON, pack
from tools.airgap import unpack

UNPACK_SCRIPT = Path(unpack.__file__)


def run_unpack(*arguments: object, file_bytes: int | None = None, path: str | None = None) -> tuple[int, str, str]:
    """Run unpack.py by a bare Python that may write files of at most `file_bytes`: (exit code, stdout, stderr)."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))) if file_bytes else None
    done = subprocess.run(
        [sys.executable, "-I", str(UNPACK_SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | ({} if path is None else {"PATH": path}),
    )
    return done.returncode, done.stdout, done.stderr


def expect_one_sentence(done: tuple[int, str, str], path: Path, words: str) -> None:
    code, _, error = done
    assert error.count("\n") == 1, error
    assert error.startswith(f"error: {path}")
    assert words in error
    assert code == 3


def replace_archive(parts: Path, name: str, content: bytes) -> None:
    """Make `content` the archive of the environment, with a manifest whose checksums agree."""
    manifest = json.loads((parts / f"{name}.json").read_text())
    sha256 = hashlib.sha256(content).hexdigest()
    file = manifest["parts"][0]["file"]
    (parts / file).write_bytes(content)
    changed = {"archive_sha256": sha256, "parts": [{"file": file, "bytes": len(content), "sha256": sha256}]}
    (parts / f"{name}.json").write_text(json.dumps(manifest | changed))


def test_names_may_follow_the_option(root: Path) -> None:
    pack(root, "first", "second")
    code, output, error = run_unpack(root / "parts", "--into", root / "engines", "first")
    assert (code, error) == (0, "")
    assert output.startswith("first: alpha 1.0 unpacked into ")
    assert not (root / "engines/second").exists()


@pytest.mark.parametrize(("folder", "words"), [("absent", "No such file"), ("host.txt", "Not a directory")])
def test_a_folder_that_cannot_be_read_is_named(root: Path, folder: str, words: str) -> None:
    expect_one_sentence(run_unpack(root / folder, "--into", root / "engines"), root / folder, words)
    assert not (root / "engines").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("[]", "not a manifest"),
        ('{"name": "notes"}', "not a manifest"),
        ('{"parts": [], "needs": []}', "not a manifest"),
    ],
)
def test_a_json_file_that_is_no_manifest_is_named(root: Path, text: str, words: str) -> None:
    pack(root, "first")
    path = root / "parts/notes.json"
    path.write_text(text, encoding="latin-1")
    expect_one_sentence(run_unpack(root / "parts", "--into", root / "engines"), path, words)
    assert run_unpack(root / "parts", "first", "--into", root / "engines")[0] == 0


def test_a_missing_part_is_named(root: Path) -> None:
    pack(root, "first")
    (root / "parts/first.tar.xz.000").unlink()
    done = run_unpack(root / "parts", "--into", root / "engines")
    expect_one_sentence(done, root / "parts/first.tar.xz.000", "is missing")


@pytest.mark.parametrize("with_xz", [True, False])
@pytest.mark.parametrize("kept_bytes", [0, 40, -30])
def test_a_truncated_archive_is_named(root: Path, kept_bytes: int, with_xz: bool) -> None:
    pack(root, "first", part_bytes=100_000)
    archive = root / "parts/first.tar.xz.000"
    replace_archive(root / "parts", "first", archive.read_bytes()[:kept_bytes])
    done = run_unpack(root / "parts", "--into", root / "engines", path=None if with_xz else str(root / "empty"))
    expect_one_sentence(done, archive.with_suffix(""), "cannot be unpacked: ")
    assert install.read_stamp(root / "engines/first") is None


@pytest.mark.parametrize("with_xz", [True, False])
def test_a_damaged_archive_is_named(root: Path, with_xz: bool) -> None:
    pack(root, "first", part_bytes=100_000)
    archive = root / "parts/first.tar.xz.000"
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    replace_archive(root / "parts", "first", bytes(content))
    done = run_unpack(root / "parts", "--into", root / "engines", path=None if with_xz else str(root / "empty"))
    expect_one_sentence(done, archive.with_suffix(""), "cannot be unpacked: ")
    pack(root, "first")
    assert run_unpack(root / "parts", "--into", root / "engines")[0] == 0


def test_a_tar_file_that_ends_early_inside_a_sound_stream_is_named(root: Path) -> None:
    pack(root, "first", part_bytes=100_000)
    archive = root / "parts/first.tar.xz.000"
    replace_archive(root / "parts", "first", lzma.compress(lzma.decompress(archive.read_bytes())[:20_000]))
    expect_one_sentence(
        run_unpack(root / "parts", "--into", root / "engines"), archive.with_suffix(""), "unexpected end"
    )


def test_a_linked_file_that_is_gone_is_an_error(root: Path) -> None:
    pack(root, "first", "second")
    unpack.unpack(root / "parts", root / "engines", ["first"])
    (root / f"engines/first/lib/python{PYTHON}/site-packages/common.py").unlink()
    done = run_unpack(root / "parts", "second", "--into", root / "engines")
    expect_one_sentence(done, root / "parts/second.tar.xz", "cannot be unpacked: ")


def test_archives_that_link_to_one_another_are_refused(root: Path) -> None:
    pack(root, "first", "second")
    path = root / "parts/first.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"needs": {"second": "0"}}))
    done = run_unpack(root / "parts", "--into", root / "engines")
    expect_one_sentence(done, root / "parts", "pack them in one call")


def test_a_target_that_cannot_be_made_is_named(root: Path) -> None:
    pack(root, "first")
    done = run_unpack(root / "parts", "--into", root / "host.txt/engines")
    expect_one_sentence(done, root / "host.txt/engines", "Not a directory")


@pytest.mark.parametrize(
    ("file_bytes", "words"), [(4000, "the virtual environment cannot be created: "), (20_000, "File too large")]
)
def test_a_disk_that_takes_no_more_is_one_sentence(root: Path, file_bytes: int, words: str) -> None:
    pack(root, "first")
    done = run_unpack(root / "parts", "--into", root / "engines", file_bytes=file_bytes)
    expect_one_sentence(done, root / "engines/first", words)
    assert run_unpack(root / "parts", "--into", root / "engines")[0] == 0


def test_an_environment_with_a_broken_stamp_is_unpacked_again(root: Path) -> None:
    pack(root, "first")
    (target,) = unpack.unpack(root / "parts", root / "engines")
    (target / unpack.STAMP).write_text('{"archive_')
    assert run_unpack(root / "parts", "--into", root / "engines")[1].startswith("first: alpha 1.0 unpacked into ")
    assert install.read_stamp(target) is not None
