"""Tier 0: manifests, checksums and the verification that needs no ranks."""

import hashlib
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.integrity import (
    Crc32,
    FileDigest,
    HashingStream,
    Manifest,
    check_files,
    digest_file,
    make_manifest,
    read_manifest,
)
from megatron.core.dist_checkpointing.verification import share_out

pytestmark = pytest.mark.tier0


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_crc32_of_pieces_is_that_of_the_whole(pieces: list[bytes]) -> None:
    """Any split of the bytes gives zlib's checksum of all of them."""
    checksum = Crc32()
    for piece in pieces:
        checksum.update(piece)
    assert checksum.hexdigest() == f'{zlib.crc32(b"".join(pieces)):08x}'


def test_stream_knows_what_reading_finds(tmp_path: Path) -> None:
    """Size and checksum of a written file, also of one that asked for its descriptor meanwhile."""
    path = tmp_path / 'shard'
    with HashingStream(path) as stream:
        stream.write(b'a' * 10)
        stream.fileno()
        assert path.stat().st_size == 10  # nothing stays in the buffer when fsync is next
        stream.write(memoryview(bytes(range(256)) * 40))
        assert stream.tell() == 10 + 256 * 40
    assert stream.digest() == digest_file(path, 'shard')


def test_stream_names_the_file_of_an_error() -> None:
    """A full disk says which file; ``/dev/full`` is one."""
    stream = HashingStream('/dev/full')
    stream.write(b'x')
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        stream.flush()


def test_manifest_has_the_form_that_unpatched_megatron_reads(tmp_path: Path) -> None:
    """With SHA-256 ``algorithm`` and ``files`` are what its own manifest has."""
    (tmp_path / 'a').write_bytes(b'one')
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'b').write_bytes(b'two')
    record = json.loads(make_manifest(tmp_path, {}, 'sha256').text())
    assert record['algorithm'] == 'sha256'
    assert record['files']['a'] == hashlib.sha256(b'one').hexdigest()
    assert record['sizes'] == {'a': 3, 'folder/b': 3}


def test_manifest_trusts_no_digest_of_another_size(tmp_path: Path) -> None:
    """A file that is not as long as its writer says, or is not there, is no part of a save."""
    (tmp_path / 'a').write_bytes(b'one')
    short = {'a': FileDigest(name='a', size=4, checksum='00000000')}
    with pytest.raises(CheckpointingException, match='has 3 bytes, but 4 were written'):
        make_manifest(tmp_path, short)
    with pytest.raises(CheckpointingException, match='was written but is not there'):
        make_manifest(tmp_path, {'b': FileDigest(name='b', size=1, checksum='00000000')})


def test_manifest_returns_as_it_was_written(tmp_path: Path) -> None:
    """Writing and reading give the same manifest; unpatched Megatron's has no sizes."""
    (tmp_path / 'a').write_bytes(b'one')
    manifest = make_manifest(tmp_path, {})
    assert read_manifest(tmp_path) is None
    (tmp_path / 'integrity.json').write_text(manifest.text())
    assert read_manifest(tmp_path) == manifest
    (tmp_path / 'integrity.json').write_text('{"algorithm": "sha256", "files": {"a": "00"}}')
    digest = FileDigest(name='a', size=None, checksum='00')
    assert read_manifest(tmp_path) == Manifest(algorithm='sha256', files={'a': digest})


@given(st.integers(min_value=0, max_value=8 * 4096 - 1))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    """Each single bit of a file counts."""
    folder = tmp_path_factory.mktemp('flip')
    content = bytearray(range(256)) * 16
    (folder / 'shard').write_bytes(content)
    digest = digest_file(folder / 'shard', 'shard')
    assert check_files(folder, 'crc32', [digest]) == []
    content[bit // 8] ^= 1 << bit % 8
    (folder / 'shard').write_bytes(content)
    (damage,) = check_files(folder, 'crc32', [digest])
    assert damage.file == 'shard'
    assert 'checksum' in damage.reason


@given(
    st.dictionaries(st.text('abc', min_size=1, max_size=5), st.integers(0, 1000), max_size=20),
    st.integers(min_value=1, max_value=6),
)
def test_files_are_shared_out_once_and_evenly(sizes: dict[str, int], ranks: int) -> None:
    """Every file is read by one rank, and no rank has more than the largest file over another."""
    digests = [FileDigest(name=name, size=size, checksum='') for name, size in sizes.items()]
    shares = share_out(digests, ranks)
    assert sorted(d.name for share in shares for d in share) == sorted(sizes)
    loads = [sum(max(d.size or 0, 1) for d in share) for share in shares]
    assert max(loads) - min(loads) <= max([*sizes.values(), 1])
