# SPDX-License-Identifier: Apache-2.0
"""Arrays travel in pieces: any arrays, cut anywhere, arrive as they are, and nothing else does."""

import json

import numpy as np
import pytest
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from nvflare.fuel.utils import fobs

from medpfl.core.errors import ProtocolError
from medpfl.flare import pieces
from medpfl.flare.pieces import KIND, PIECE, Arrays, Pieces, Travelling, cut_for

RNG = np.random.default_rng(0)
ARRAYS = {
    "small": RNG.normal(size=3).astype(np.float32),
    "empty": np.zeros((0, 5), np.float16),
    "scalar": np.array(7, np.int64),
    "half": RNG.normal(size=(2, 3, 4)).astype(np.float16),
    "large": RNG.normal(size=(33, 7)),
    "flags": RNG.random(11) > 0.5,
    "bytes": RNG.integers(0, 255, 100, dtype=np.uint8),
    "turned": RNG.normal(size=(4, 6)).astype(np.float32).T,
    "every second": np.arange(20, dtype=np.int32)[::2],
    "complex": (RNG.normal(size=2) + 1j).astype(np.complex64),
    "other order of bytes": np.arange(5, dtype=">f4"),
    "last": np.zeros(0, np.float32),
}


def carried(sender: Pieces, receiver: Arrays) -> int:
    """As FLARE does it; how many pieces there were."""
    state: dict[str, object] = {}
    for count in range(10_000):
        code, data, state = sender.produce(state, "receiver")
        if code == ProduceRC.EOF:
            receiver.download_completed("ref")
            return count
        assert code == ProduceRC.OK and data is not None
        assert receiver.consume("ref", state, data) == state
    raise AssertionError("it does not end")


@pytest.mark.parametrize("most", [1, 7, 64, 10_000])
def test_arrays_arrive_as_they_are_wherever_they_are_cut(most: int) -> None:
    receiver = Arrays(10**6)
    count = carried(Pieces(ARRAYS, most), receiver)
    assert count == -(-sum(one.nbytes for one in ARRAYS.values()) // most)
    assert list(receiver.arrays) == list(ARRAYS)
    for name, one in ARRAYS.items():
        came = receiver.arrays[name]
        assert (came.dtype, came.shape) == (one.dtype, one.shape)
        assert came.tobytes() == one.tobytes() and came.flags.writeable


@pytest.mark.parametrize("arrays", [{}, {"empty": np.zeros(0)}])
def test_what_has_no_bytes_is_one_piece(arrays: dict[str, np.ndarray]) -> None:
    receiver = Arrays(0)
    assert carried(Pieces(arrays, 5), receiver) == 1
    assert list(receiver.arrays) == list(arrays)


def test_a_piece_that_is_asked_for_again_is_the_same() -> None:
    sender = Pieces(ARRAYS, 100)
    _, _, state = sender.produce({}, "receiver")
    assert sender.produce(state, "receiver") == sender.produce(state, "receiver")


def test_nothing_is_copied_before_it_is_asked_for() -> None:
    array = np.zeros(1000, np.float32)
    sender = Pieces({"a": array}, 400)
    array[:] = 1
    receiver = Arrays(10**6)
    carried(sender, receiver)
    assert receiver.arrays["a"].tolist() == [1.0] * 1000


@pytest.mark.parametrize("state", [{"at": -1}, {"at": 5000}, {"at": "0"}, {"at": None}, {"other": 1}])
def test_what_is_no_place_in_it_is_refused(state: dict[str, object]) -> None:
    code, data, _ = Pieces({"a": np.zeros(1000, np.float32)}, 400).produce(state, "receiver")
    assert (code, data) == (ProduceRC.ERROR, None)


@pytest.mark.parametrize(
    "said, problem",
    [
        ("{}", "does not say which arrays"),
        ('[["a", "|O", [2]]]', "what no array is"),
        ('[["a", "<U5", [2]]]', "what no array is"),
        ('[["a", "<f4", [-2]]]', "what no array is"),
        ('[["a", "<f4", [2.5]]]', "what no array is"),
        ('[["a", "<f4", [1000000, 1000000, 1000000]]]', "may be taken for it"),
        ('[["a", "<f4", [1]], ["a", "<f4", [1]]]', "two arrays of one name"),
    ],
)
def test_what_says_of_its_arrays_what_cannot_be_is_refused(said: str, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        Arrays(10**6).consume("ref", {"at": 0}, [said.encode()])


def test_more_bytes_than_were_said_are_refused() -> None:
    receiver = Arrays(10**6)
    receiver.consume("ref", {"at": 0}, [b'[["a", "<f4", [1]]]', b"1234"])
    with pytest.raises(ProtocolError, match="more bytes than it says"):
        receiver.consume("ref", {"at": 4}, [b"5"])


@pytest.mark.parametrize("data", [None, [b'[["a", "<f4", [1]]]', b"123"]])
def test_fewer_bytes_than_were_said_are_no_answer(data: list[bytes] | None) -> None:
    receiver = Arrays(10**6)
    if data:
        receiver.consume("ref", {"at": 0}, data)
    with pytest.raises(ProtocolError, match="ended early"):
        receiver.download_completed("ref")
    assert receiver.error == "it ended early"


def test_what_was_broken_off_leaves_no_arrays() -> None:
    receiver = Arrays(10**6)
    receiver.consume("ref", {"at": 0}, [b'[["a", "<f4", [1]]]'])
    receiver.download_failed("ref", "the line was cut")
    assert (receiver.error, receiver.arrays) == ("the line was cut", {})


def test_without_a_network_arrays_are_whole() -> None:
    content = fobs.loads(fobs.dumps({"a": np.arange(5, dtype=np.float32).view(Travelling)}))
    assert type(content["a"]) is np.ndarray and content["a"].tolist() == [0, 1, 2, 3, 4]


def test_pieces_are_smaller_where_many_fetch_and_memory_is_short() -> None:
    handler = fobs.get_dot_handler(KIND)
    try:
        cut_for(4, 0)
        assert handler.max_chunk_size == PIECE
        cut_for(64, 0)
        assert handler.max_chunk_size == PIECE // 16
        cut_for(64, 64 * 2**30)
        assert handler.max_chunk_size == PIECE
    finally:
        handler.max_chunk_size = PIECE


def test_what_is_said_first_is_plain_text() -> None:
    _, data, _ = Pieces({"a": np.zeros((2, 1), np.float32)}, 400).produce({}, "receiver")
    assert data is not None and json.loads(data[0]) == [["a", "<f4", [2, 1]]]
    assert pieces.may_take(10**15) == 10**15
