# SPDX-License-Identifier: Apache-2.0
"""Every codec: what is decoded is what was reduced, what cannot be right is refused, and errors are fed back."""

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from medpfl.core.codecs import CER, STC, Chain, Codec, DAdaQuant, Half, Progress, decode, encode_with_feedback
from medpfl.core.codecs import bits as positions_as_bits
from medpfl.core.codecs.contract import tensors_of, vector_of
from medpfl.core.codecs.dadaquant import levels_over_time
from medpfl.core.codecs.progress import hospital_scales
from medpfl.core.errors import CodecError, ConfigError

CODECS = [
    Half(), STC(0.01), STC(0.2), STC(1.0), CER(0.0), CER(0.1), CER(2.0), DAdaQuant(1), DAdaQuant(7), DAdaQuant(300),
    Chain(CER(0.3), STC(0.05)), Chain(CER(0.3), Half()),
]  # fmt: skip
SHAPES = st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4), (), (60,)])
# As large as Half takes; zeros and repeated magnitudes are drawn often.
VALUES = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5]), st.floats(-60000, 60000, width=32))
UPDATES = st.dictionaries(
    st.sampled_from(["w", "bias", "layer.0.w", "z"]),
    SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=VALUES)).map(torch.from_numpy),
    min_size=1,
)


def update(seed: int = 0, width: int = 200) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"b": torch.randn(width, 3, generator=generator), "a": torch.randn(5, generator=generator)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype and one[k].shape == other[k].shape for k in one
    )


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(tensors=UPDATES, seed=st.integers(0, 2**63))
@pytest.mark.slow
def test_decoding_gives_what_was_reduced(codec: Codec, tensors: dict[str, Tensor], seed: int) -> None:
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    data = codec.encode(tensors, seed)
    reduced = codec.reduce(vector_of(tensors), seed)
    decoded = decode(data, tensors)
    assert same(decoded, tensors_of(reduced, tensors))
    assert vector_of(decoded).tobytes() == reduced.tobytes()  # zeros keep their sign as well
    assert codec.encode(tensors, seed) == data  # nothing is remembered
    assert same(tensors, before)


@pytest.mark.parametrize("codec", [Half(), STC(0.01), STC(0.2), STC(1.0), DAdaQuant(1), DAdaQuant(7)], ids=repr)
@given(tensors=UPDATES)
@pytest.mark.slow
def test_reducing_again_changes_nothing(codec: Codec, tensors: dict[str, Tensor]) -> None:
    once = codec.reduce(vector_of(tensors), 1)
    assert np.array_equal(codec.reduce(once, 2), once)


@given(tensors=UPDATES, p=st.floats(0.01, 1))
@pytest.mark.slow
def test_stc_keeps_the_largest_with_their_mean(tensors: dict[str, Tensor], p: float) -> None:
    vector = vector_of(tensors)
    reduced = STC(p).reduce(vector, 0)
    kept, count = np.flatnonzero(reduced), max(1, round(p * len(vector)))
    assert len(kept) == min(count, np.count_nonzero(vector))
    if len(kept):
        assert np.abs(vector[kept]).min() >= np.abs(np.delete(vector, kept)).max(initial=0.0)
        assert np.array_equal(np.sign(reduced[kept]), np.sign(vector[kept]))
        assert np.abs(reduced[kept]) == pytest.approx(np.abs(vector[kept].astype(float)).mean(), rel=1e-6)


def test_half_is_ieee() -> None:
    vector = np.array([1.0, 0.1, -65504, 6e-8, 1e-9], np.float32)
    assert np.array_equal(Half().reduce(vector, 0), vector.astype(np.float16).astype(np.float32))
    with pytest.raises(CodecError, match="values up to 7e\\+04 does not fit 16 bits, which end at 65504"):
        Half().encode({"w": torch.tensor([7e4])})


@pytest.mark.slow
def test_dadaquant_is_right_on_average_and_has_few_levels() -> None:
    vector = np.random.default_rng(0).normal(size=50).astype(np.float32)
    draws = np.stack([DAdaQuant(3).reduce(vector, seed) for seed in range(4000)])
    step = float(np.abs(vector).max()) / 3
    np.testing.assert_allclose(draws.mean(axis=0), vector, atol=4 * step / 2 / np.sqrt(4000))
    assert len(np.unique(np.abs(draws))) <= 4
    assert np.array_equal(DAdaQuant(1).reduce(-vector, 5), -DAdaQuant(1).reduce(vector, 5))


def test_levels_of_the_hospitals_are_the_cheapest_for_their_variance() -> None:
    sizes = np.array([100.0, 700, 40, 2000])
    shares = sizes / sizes.sum()
    found = 200 * np.array(hospital_scales(sizes.tolist()))
    assert (shares**2 / found**2).sum() == pytest.approx((shares**2).sum() / 200**2, rel=1e-9)
    assert found.sum() < 4 * 200
    np.testing.assert_allclose(found / found[1], (shares / shares[1]) ** (2 / 3), rtol=1e-9)
    assert hospital_scales([10, 10]) == pytest.approx([1, 1])


def test_dadaquant_adapts_to_loss_and_size() -> None:
    still = (1.0,) * 11  # q = 4
    assert DAdaQuant().at(Progress(still)) == DAdaQuant(4) and DAdaQuant().at(Progress(still, 1.7)) == DAdaQuant(7)
    assert DAdaQuant().at(Progress()) == DAdaQuant(1) == DAdaQuant().at(Progress((), 0.1))
    assert DAdaQuant().at(Progress((), 1e9)) == DAdaQuant(65535)
    assert DAdaQuant(3).at(Progress(still, 5.0)) == DAdaQuant(3) and not DAdaQuant(3).adapts
    chained = Chain(CER(0.1), DAdaQuant())
    assert chained.adapts and chained.at(Progress(still)) == Chain(CER(0.1), DAdaQuant(4)) and not STC(0.1).adapts


def test_levels_double_when_the_loss_stands_still() -> None:
    assert levels_over_time([]) == 1
    assert levels_over_time([1 / (n + 1) for n in range(50)]) == 1
    assert [levels_over_time([1.0] * n, phi=5) for n in (5, 6, 10, 11, 16)] == [1, 2, 2, 4, 8]
    assert levels_over_time([1.0] * 500, phi=5, most=64) == 64


@pytest.mark.parametrize("codec", [STC(0.05), Chain(CER(0.3), STC(0.05)), Half(), DAdaQuant(2)], ids=repr)
@given(updates=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
@pytest.mark.slow
def test_what_was_sent_and_the_residual_are_the_sum_of_the_updates(codec: Codec, updates: list[int]) -> None:
    residual: dict[str, Tensor] = {}
    sent = {key: torch.zeros_like(tensor, dtype=torch.float64) for key, tensor in update().items()}
    total = {key: tensor.clone() for key, tensor in sent.items()}
    for number, seed in enumerate(updates):
        new = update(seed)
        data, residual = encode_with_feedback(codec, new, residual, seed=number)
        for key, tensor in decode(data, new).items():
            sent[key] += tensor
            total[key] += new[key]
    for key in total:
        torch.testing.assert_close(sent[key] + residual[key], total[key], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_without_a_residual_the_message_is_the_plain_one() -> None:
    data, residual = encode_with_feedback(STC(0.1), update(), {})
    assert data == STC(0.1).encode(update())
    assert all(residual[key].abs().sum() > 0 for key in residual)


def test_a_chain_is_one_after_the_other() -> None:
    vector = vector_of(update())
    chain = Chain(CER(0.3), STC(0.05))
    assert np.array_equal(chain.reduce(vector, 0), STC(0.05).reduce(CER(0.3).reduce(vector, 0), 0))
    assert chain.tag == "stc"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types_come_back(dtype: torch.dtype) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in update().items()}
    decoded = decode(CER(0.2).encode(tensors), tensors)
    assert {tensor.dtype for tensor in decoded.values()} == {dtype}


def test_few_bits_for_few_entries() -> None:
    tensors = {"w": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))}
    entropy = 10_000 * 1 + 1_000_000 * -(0.01 * np.log2(0.01) + 0.99 * np.log2(0.99))
    assert 8 * len(STC(0.01).encode(tensors)) < 1.05 * entropy  # a Golomb code cannot be far from the entropy


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "an update without tensors"),
        ({"w": torch.ones(2), "v": torch.ones(0, 3)}, "'v' cannot be encoded: it is empty"),
        ({"w": torch.tensor([1.0, float("nan")])}, "'w' cannot be encoded: it holds NaN"),
        ({"w": torch.tensor([float("inf"), -float("inf")])}, "'w' cannot be encoded: it holds NaN"),
        ({"w": torch.tensor([1e300], dtype=torch.float64)}, "'w' .* a value beyond float32"),
        ({"n": torch.ones(2, dtype=torch.int64)}, "'n' .* torch.int64, codecs take floating-point"),
    ],
)
def test_what_cannot_be_encoded_is_refused(codec: Codec, tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        codec.encode(tensors)


def test_a_receiver_without_the_codec_says_so() -> None:
    data = STC(0.1).encode(update())
    for wrong, words in [
        (
            data.replace(b"stc", b"xyz"),
            "encoded as 'xyz' version 1, which is not known here; known: dadaquant version 1",
        ),
        (data[:8] + b"\x02" + data[9:], "encoded as 'stc' version 2, which is not known here"),
        (b"", "what came is not an encoded update"),
        (b"PK\x03\x04" + data[4:], "what came is not an encoded update"),
    ]:
        with pytest.raises(CodecError, match=words):
            decode(wrong, update())
    with pytest.raises(CodecError, match="is of tensors other than those expected"):
        decode(data, {"b": torch.ones(200, 3), "a": torch.ones(6)})


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(data=st.data())
@settings(max_examples=150)
@pytest.mark.slow
def test_damaged_messages_are_refused_or_decode_to_numbers(codec: Codec, data: st.DataObject) -> None:
    like = update(width=20)
    message = bytearray(codec.encode(like))
    for _ in range(data.draw(st.integers(0, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(message)), st.integers(0, len(message))))
    try:
        decoded = decode(bytes(message[:cut]) + data.draw(st.binary(max_size=3)), like)
    except CodecError:
        return
    assert all(torch.isfinite(tensor).all() for tensor in decoded.values())


@pytest.mark.parametrize("codec", [STC(0.1), CER(0.1), DAdaQuant(1), DAdaQuant(3), Half()], ids=repr)
def test_every_truncation_and_every_addition_is_refused(codec: Codec) -> None:
    like = update(width=20)
    message = codec.encode(like)
    for cut in range(len(message)):
        with pytest.raises(CodecError):
            decode(message[:cut], like)
    for more in (b"\x00", b"\xff" * 9):
        with pytest.raises(CodecError, match="is damaged: it does not decode to 65 values"):
            decode(message + more, like)


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        (STC(), struct.pack("<fQB", 1.0, 2**40, 0) + b"\x00" * 40),
        (STC(), struct.pack("<fQB", 1.0, 30_000_000, 200)),
        (STC(), struct.pack("<fQB", 1.0, 1, 0) + b"\xff" * 100),
        (CER(), struct.pack("<QB", 2**62, 3)),
        (CER(), struct.pack("<QB", 30_000_000, 0) + b"\x00" * 40),
        (DAdaQuant(), struct.pack("<fHQB", 1.0, 300, 30_000_000, 40) + b"\x00" * 40),
        (DAdaQuant(), struct.pack("<fHQB", 1.0, 300, 2, 0) + b"\x00" * 40),
    ],
)
def test_a_claim_takes_no_memory(codec: Codec, payload: bytes) -> None:
    codec.unpack(payload, 30_000_000)  # what numba compiles or loads the first time is not counted
    tracemalloc.start()
    try:
        assert codec.unpack(payload, 30_000_000) is None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: STC(0), r"STC's p must be in \(0, 1\], got 0"),
        (lambda: STC(1.5), "got 1.5"),
        (lambda: CER(-1), "CER's gamma must be at least 0, got -1"),
        (lambda: DAdaQuant(0), "DAdaQuant's levels must be from 1 to 65535, got 0"),
    ],
)
def test_bad_settings_get_a_sentence(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("ones", [2**23, 2**24], ids=["negative", "zero"])
@pytest.mark.parametrize(
    ("codec", "head"),
    [(STC(), struct.pack("<fQB", 1.0, 1, 40)), (DAdaQuant(), struct.pack("<fHQB", 1.0, 1, 1, 40))],
    ids=["stc", "dadaquant"],
)
def test_a_gap_beyond_64_bits_is_refused(codec: Codec, head: bytes, ones: int) -> None:
    payload = head + b"\xff" * (ones // 8) + bytes(6)  # so many times 2^40; a zero, 40 low bits and a sign follow
    refused = codec.unpack(payload, 65) is None
    assert refused


def test_compiled_code_is_kept_or_made_anew() -> None:
    """Where numba has no folder for its cache, functions are compiled in every process instead of failing."""
    from medpfl.core.compiled import compiled

    def double(x: int) -> int:
        return 2 * x

    exec_globals: dict[str, object] = {}
    exec(compile("def triple(x):\n    return 3 * x\n", "<nowhere>", "exec"), exec_globals)
    assert compiled(double)(4) == 8
    assert compiled(exec_globals["triple"])(4) == 12  # type: ignore[type-var, operator]


@pytest.mark.parametrize("density", [*np.geomspace(1e-5, 0.9, 60), 0.01, 0.03, 0.05, 0.2])
def test_positions_are_coded_with_the_parameter_of_the_least_bits(density: float) -> None:
    length = 10**7
    chosen = positions_as_bits.rice_parameter(round(density * length), length)
    # Positions at random: a gap is g with probability density * q^g, so it takes q^(2^b) / (1 - q^(2^b)) ones.
    q = 1 - round(density * length) / length
    ones = [q ** (1 << b) / (1 - q ** (1 << b)) for b in range(30)]
    assert chosen == int(np.argmin([b + 1 + count for b, count in enumerate(ones)]))


@pytest.mark.parametrize("density", [0.003, 0.01, 0.03, 0.05, 0.2])
def test_no_other_parameter_makes_a_message_smaller(density: float) -> None:
    length = 200_000
    positions = np.flatnonzero(np.random.default_rng(0).random(length) < density)
    nothing = np.empty(0, np.int64)
    rice, code = positions_as_bits.write(positions, nothing > 0, nothing, length, positions_as_bits.GAPS)
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = [-(-int((gaps >> b).sum() + len(gaps) * (b + 1)) // 8) for b in range(20)]
    assert len(code) == sizes[rice] == min(sizes)
