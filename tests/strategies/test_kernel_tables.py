"""Every kernel of the tables against the XLA version, on the device and near the data; and how kernels are chosen."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory_pool import link
from memory_pool.near import near_data
from memory_pool.raw import raw_dtype
from strategies import kernel_tables, low_rank, native, paged_attention
from strategies.kernel_tables import DECODE, PREFILL, XLA, Kernel, choose_kernels, describe_kernels
from strategies.lanes import ABSENT, BASE, AttentionLane
from strategies.paged_attention import NO_WINDOW, HeadMaths, finish
from strategies.setting import AttentionSetting, LoraSetting
from tests.strategies.pages_for_tests import int8_pages, make_layout, pack_adapters

# Pages of 512 numbers: rows of 104 and 200 lie in one page or in two, rows of 1160 in three or four; 1160 is no
# multiple of 16.
WIDTHS = {"q": (200, 104), "k": (8, 104), "down": (104, 1160)}
GROUPS = (("q", "k"), ("down",))
RANKS = [[4, 0, 3], [0, 0, 0], [70, 9, 5], [13, 2, 0], *([r, r % 3, 1] for r in range(1, 9))]
MAX_RANK = 70
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def kernels(*fields: str, of: Any = (DECODE, PREFILL)) -> Any:
    """Parametrises over the entries of the tables that run here."""
    found = {
        f"{field}-{kernel.name}": (kernel, field)
        for tables in of
        for field in fields
        for kernel in tables["cpu"].get(field, ())
        if kernel.unsupported(None) is None
    }
    assert found or native.unavailable(), "the native kernels build here, so the tables must have them"
    return pytest.mark.parametrize(("kernel", "field"), found.values(), ids=found)


PLACES = pytest.mark.parametrize("place", ["device", "near"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Of x, and of adapters unless they are int8.
LORA_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32, int8", "bfloat16, int8"])


def run(call: Any, operands: Any, place: str = "device", **static: Any) -> Any:
    """Compiled, with operands and results where the place is."""

    def near(*operands: Any) -> Any:
        results = near_data(functools.partial(call, **static))(*jax.tree.map(link.to_pool, operands))
        return jax.tree.map(link.to_device, results)

    return jax.jit(near if place == "near" else functools.partial(call, **static))(*operands)


def close(got: Any, want: Any, dtype: str) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        tolerance = TOLERANCE[dtype.partition(",")[0]] * max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, atol=tolerance)


class LoraCase(NamedTuple):
    """Adapters in pages and tokens that use them, some together, some alone, some of the base model."""

    layout: Any
    packed: Any
    owner: Any
    x: Any
    m: Any

    def operands(self, field: str, group: tuple[str, ...], tokens: Any = slice(None), layer: int = 1) -> Any:
        first = self.m[group][:, tokens] if field == "expand" else self.x[group][tokens]
        return first, self.packed.pages, np.int32(layer), self.packed.lane(self.owner[tokens])

    def static(self, field: str, group: tuple[str, ...]) -> dict[str, Any]:
        return {"layout": self.layout, "group": group} | ({} if field == "expand" else {"max_rank": MAX_RANK})


@functools.cache
def lora_case(dtype: str) -> LoraCase:
    rng = np.random.default_rng(0)
    numbers, _, int8 = dtype.partition(", ")
    layout = make_layout(widths=WIDTHS, page_tokens=16, dtype=numbers, int8_adapters=bool(int8))
    packed = pack_adapters(rng, layout, ranks=RANKS, room=len(RANKS) + 2)
    owner = np.concatenate([[0, BASE, 2, 1, 2, 3, 2, 2, 2, BASE], rng.integers(0, len(RANKS), 13)]).astype(np.int32)
    x = {group: rng.normal(size=(len(owner), layout.in_width(group[0]))).astype(layout.dtype) for group in GROUPS}
    m = {group: rng.normal(size=(len(group), len(owner), MAX_RANK)).astype(layout.dtype) for group in GROUPS}
    return LoraCase(layout, packed, owner, x, m)


@functools.cache
def lora_reference(field: str, dtype: str, group: tuple[str, ...]) -> Any:
    case = lora_case(dtype)
    return run(getattr(XLA, field).call, case.operands(field, group), **case.static(field, group))


@pytest.mark.parametrize("group", GROUPS, ids="+".join)
@kernels("delta")
def test_delta_kernel_rounds_its_results_once(kernel: Kernel, field: str, group: tuple[str, ...]) -> None:
    case = lora_case("bfloat16")
    operands, static = case.operands(field, group), case.static(field, group)
    exact = run(kernel.call, operands, **static)
    for _ in range(2):  # What a call leaves in its room must not come back.
        got = run(kernel.call, operands, "near", out_dtype=jnp.bfloat16, **static)
        for one, other in zip(got, exact, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))
        other_operands = (-operands[0], operands[1], operands[2], case.packed.lane(np.roll(case.owner, 3)))
        run(kernel.call, other_operands, "near", out_dtype=jnp.bfloat16, **static)


@PLACES
@LORA_DTYPES
@pytest.mark.parametrize("group", GROUPS, ids="+".join)
@kernels("shrink", "expand", "delta")
def test_lora_kernel_equals_xla(kernel: Kernel, field: str, group: tuple[str, ...], dtype: str, place: str) -> None:
    case = lora_case(dtype)
    got = run(kernel.call, case.operands(field, group), place, **case.static(field, group))
    close(got, lora_reference(field, dtype, group), dtype)
    if field != "shrink":
        for y in got:
            assert not np.asarray(y)[(case.owner == BASE) | (case.owner == 1)].any(), "no adapter, no rank: exact zeros"


@PLACES
@kernels("shrink")
def test_shrink_kernel_for_float32_results_does_not_round(kernel: Kernel, field: str, place: str) -> None:
    case, group = lora_case("bfloat16"), ("q", "k")
    static = case.static(field, group) | {"out_dtype": jnp.float32}
    m = run(kernel.call, case.operands(field, group), place, **static)
    want = [case.packed.shrink(case.x[group], 1, case.owner, name, max_rank=MAX_RANK) for name in group]
    np.testing.assert_allclose(m, want, atol=2e-4)


@kernels("expand")
def test_expand_kernel_takes_float32_beside_bfloat16_pages(kernel: Kernel, field: str) -> None:
    case, group = lora_case("bfloat16"), ("down",)
    m, *rest = case.operands(field, group)
    got = run(kernel.call, (m.astype(np.float32), *rest), **case.static(field, group))
    close(got, (case.packed.expand(m[0], 1, case.owner, "down").astype(np.float32),), "float32")


@PLACES
@LORA_DTYPES
@kernels("rows")
def test_rows_kernel_equals_xla(kernel: Kernel, field: str, dtype: str, place: str) -> None:
    case = lora_case(dtype)
    for side, name in (("a", "q"), ("b", "q"), ("a", "down"), ("b", "k")):
        total = int(case.packed.ranks[:, case.layout.index(name)].sum())
        for chunk in range(-(-total // low_rank.CHUNK_ROWS)):
            operands = (case.packed.pages, np.int32(1), case.packed.lane(case.owner), np.int32(chunk))
            static = {"layout": case.layout, "name": name, "side": side}
            got = run(kernel.call, operands, place, **static)
            want = run(XLA.rows.call, operands, **static)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            real = total - chunk * low_rank.CHUNK_ROWS
            np.testing.assert_array_equal(got[:real], want[:real])


@LORA_DTYPES
@pytest.mark.parametrize("group", GROUPS, ids="+".join)
@kernels("shrink", "expand", "delta")
@pytest.mark.parametrize("tokens", [1, 5])
def test_lora_kernel_token_is_bit_equal_in_any_company(
    kernel: Kernel, field: str, tokens: int, group: tuple[str, ...], dtype: str
) -> None:
    case = lora_case(dtype)
    static = case.static(field, group)
    together = run(kernel.call, case.operands(field, group), **static)
    some = np.array([2, 12, 6, 1, 5])[:tokens]
    apart = run(kernel.call, case.operands(field, group, some), **static)
    for one, all_of_them in zip(apart, together, strict=True):
        np.testing.assert_array_equal(one, np.asarray(all_of_them)[some])


@functools.cache
def sums(dtype: str, group: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    """Of more rows than there are tokens."""
    case, rng = lora_case(dtype), np.random.default_rng(3)
    return tuple(
        rng.normal(size=(len(case.owner) + 5, case.layout.out_width(name))).astype(np.float32) for name in group
    )


@LORA_DTYPES
@pytest.mark.parametrize("group", GROUPS, ids="+".join)
@kernels("add")
def test_add_kernel_adds_delta_to_the_rows_of_tokens_with_an_adapter(
    kernel: Kernel, field: str, group: tuple[str, ...], dtype: str
) -> None:
    case, before, first = lora_case(dtype), sums(dtype, group), 3
    x, *others = case.operands(field, group)
    rows = jnp.pad(x, ((first, len(before[0]) - first - len(x)), (0, 0)), constant_values=jnp.nan)
    got = run(kernel.call, (before, rows, *others), first=first, **case.static(field, group))
    for name, one, was, part in zip(group, got, before, lora_reference("delta", dtype, group), strict=True):
        want = was.copy()
        want[first : first + len(case.owner)] += np.asarray(part)
        close((one,), (want,), dtype)
        nothing = (case.owner == BASE) | (case.packed.ranks[case.owner, case.layout.index(name)] == 0)
        changed = np.flatnonzero((np.asarray(one) != was).any(axis=1)) - first
        assert changed.tolist() == np.flatnonzero(~nothing).tolist(), "no other row may change"


@kernels("add")
def test_add_kernel_token_is_bit_equal_in_any_company(kernel: Kernel, field: str) -> None:
    group = ("q", "k")
    case, before = lora_case("bfloat16"), sums("bfloat16", group)
    static = case.static(field, group)
    together = run(kernel.call, (before, *case.operands(field, group)), **static)
    some = np.array([2, 12, 6, 1, 5])
    apart = run(kernel.call, (tuple(y[some] for y in before), *case.operands(field, group, some)), **static)
    for one, all_of_them in zip(apart, together, strict=True):
        np.testing.assert_array_equal(one, np.asarray(all_of_them)[some])


@kernels("expand", "delta")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_lora_kernel_adapter_that_is_not_finite_reaches_only_its_own_tokens(
    kernel: Kernel, field: str, bad: float
) -> None:
    rng = np.random.default_rng(4)
    layout = make_layout(widths=WIDTHS)
    packed = pack_adapters(rng, layout, ranks=RANKS[:3])
    numbers = packed.pages.view(np.float32)
    numbers[:, packed.a_pages[0, 0], 0] = bad
    numbers[:, packed.b_pages[0, 0], 0] = bad
    x = rng.normal(size=(3, 104)).astype(np.float32)
    m = rng.normal(size=(1, 3, MAX_RANK)).astype(np.float32)
    case = LoraCase(layout, packed, np.array([0, 2, BASE], np.int32), {("q",): x}, {("q",): m})
    (y,) = run(kernel.call, case.operands(field, ("q",)), **case.static(field, ("q",)))
    assert not np.isfinite(y[0]).all(), "an adapter that is not finite must not look as if it were"
    assert np.isfinite(y[1:]).all()


class AttentionCase(NamedTuple):
    """Groups of several lengths, the last one padding; one has few queries; some pages are absent."""

    layout: Any
    operands: Any

    def attend(self, call: Any, place: str = "device", *, window: int = NO_WINDOW, cap: float | None = None) -> Any:
        def attend(q: jax.Array, pages: jax.Array, at: jax.Array, lane: AttentionLane) -> Any:
            return call(q, pages, at[0], lane, HeadMaths(0.3, cap, at[1]), layout=self.layout)

        q, pages, lane = self.operands
        return run(attend, (q, pages, np.array([1, window], np.int32), lane), place)


@functools.cache
def attention_case(
    dtype: str, page_tokens: int, head_dim: int, queries: int, *, int8_kv: bool = False
) -> AttentionCase:
    rng = np.random.default_rng(page_tokens)
    layout = make_layout(widths={"q": (8, 8)}, page_tokens=page_tokens, head_dim=head_dim, dtype=dtype, int8_kv=int8_kv)
    groups, table_pages = 5, 256 // page_tokens
    shape = (2, 1 + groups * table_pages, 2, layout.kv_heads, page_tokens, head_dim)
    numbers = rng.normal(size=shape).astype(layout.dtype)
    tables = 1 + rng.permutation(groups * table_pages).reshape(groups, table_pages).astype(np.int32)
    last = np.array([queries - 1, 100, 201, 255, 0])
    positions = (last[:, None] + np.arange(1 - queries, 1)[None]).astype(np.int32)
    positions[1, queries // 2 + 1 :] = -1
    positions[4] = -1
    for table, own in zip(tables, positions, strict=True):
        for token in range(own.max() + 1, 256):  # what was there before, of whomever
            numbers[:, table[token // page_tokens], :, :, token % page_tokens] = np.nan
    numbers[:, 0] = np.nan
    tables[2:][rng.uniform(size=tables[2:].shape) < 0.3] = ABSENT
    q = rng.normal(size=(groups, layout.kv_heads, queries * 3, head_dim)).astype(layout.dtype)
    lane = AttentionLane(tables, positions, np.int32(0), np.int32(256))
    if int8_kv:
        return AttentionCase(layout, (q, int8_pages(numbers, layout)[0], lane))
    return AttentionCase(layout, (q, numbers.reshape(2, -1, layout.page_width).view(raw_dtype(layout.dtype)), lane))


def equal_partials(got: Any, want: Any, dtype: str) -> None:
    seen = np.asarray(want.sum) > 0
    assert seen.any()
    assert not seen.all()
    np.testing.assert_array_equal(np.asarray(got.sum) > 0, seen)
    np.testing.assert_array_equal(np.asarray(got.max)[~seen], np.asarray(want.max)[~seen])
    close((finish(got), got.max, got.sum), (finish(want), want.max, want.sum), dtype)


@PLACES
@DTYPES
@pytest.mark.parametrize(
    ("page_tokens", "head_dim", "queries"),
    [(16, 64, 1), (2, 24, 5), (32, 80, 16), (16, 64, 16), (32, 128, 2), (16, 96, 3)],
)
@pytest.mark.parametrize(("window", "cap"), [(NO_WINDOW, None), (37, 5.0)])
@kernels("attention")
def test_attention_kernel_equals_xla(
    kernel: Kernel,
    field: str,
    window: int,
    cap: float | None,
    page_tokens: int,
    head_dim: int,
    queries: int,
    dtype: str,
    place: str,
) -> None:
    case = attention_case(dtype, page_tokens, head_dim, queries)
    got = case.attend(kernel.call, place, window=window, cap=cap)
    want = case.attend(XLA.attention.call, window=window, cap=cap)
    equal_partials(got, want, dtype)


@PLACES
@DTYPES
@pytest.mark.parametrize(("page_tokens", "head_dim", "queries"), [(16, 64, 1), (2, 24, 5), (32, 96, 16)])
@kernels("attention")
def test_attention_kernel_over_int8_pages_equals_xla(
    kernel: Kernel, field: str, page_tokens: int, head_dim: int, queries: int, dtype: str, place: str
) -> None:
    case = attention_case(dtype, page_tokens, head_dim, queries, int8_kv=True)
    got = case.attend(kernel.call, place, window=37, cap=5.0)
    equal_partials(got, case.attend(XLA.attention.call, window=37, cap=5.0), dtype)


@kernels("attention")
def test_attention_kernel_takes_a_window_that_is_a_number(kernel: Kernel, field: str) -> None:
    case = attention_case("float32", 16, 64, 1)
    q, pages, lane = case.operands

    def attend(q: jax.Array, pages: jax.Array, layers: jax.Array, lane: AttentionLane) -> Any:
        return kernel.call(q, pages, layers[0], lane, HeadMaths(0.3, None, 50), layout=case.layout)

    got = run(attend, (q, pages, np.ones(1, np.int32), lane), "near")
    equal_partials(got, case.attend(XLA.attention.call, window=50), "float32")


@pytest.mark.parametrize("int8_kv", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 16])
@kernels("attention")
def test_attention_kernel_group_is_bit_equal_in_any_company(
    kernel: Kernel, field: str, queries: int, int8_kv: bool
) -> None:
    case = attention_case("bfloat16", 16, 64, queries, int8_kv=int8_kv)
    q, pages, lane = case.operands
    alone = AttentionCase(
        case.layout, (q[2:3], pages, lane._replace(tables=lane.tables[2:3], positions=lane.positions[2:3]))
    )
    got, want = alone.attend(kernel.call), case.attend(kernel.call)
    for one, all_of_them in zip(got, want, strict=True):
        np.testing.assert_array_equal(one[0], all_of_them[2])


def test_native_kernels_refuse_a_dtype_that_they_do_not_compute_in() -> None:
    layout = make_layout(widths=WIDTHS)
    packed = pack_adapters(np.random.default_rng(0), layout, ranks=RANKS[:1])
    x = jnp.zeros((3, 104), jnp.float16)
    with pytest.raises(TypeError, match="take bfloat16 and float32, not float16: cast it, or set PLORA_NATIVE=0"):
        native.delta(
            x,
            jnp.asarray(packed.pages),
            jnp.int32(0),
            packed.lane([0, 0, 0]),
            layout=layout,
            group=("q",),
            max_rank=MAX_RANK,
        )


def test_choose_kernels_takes_the_first_that_applies_and_ends_with_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = Kernel("slow", low_rank.delta, lambda _: None), Kernel("fast", low_rank.delta, lambda _: "no compiler")
    monkeypatch.setattr(kernel_tables, "DECODE", {"cpu": {"delta": (fast, slow)}})
    monkeypatch.setattr(kernel_tables, "PREFILL", {"cpu": {"rows": (fast,)}})
    chosen = choose_kernels("cpu")
    assert chosen.decode == XLA._replace(delta=slow)
    assert chosen.prefill == XLA
    assert describe_kernels(chosen, "cpu") == (
        "decode: xla (shrink, expand, add, rows, attention), slow (delta); prefill: xla (shrink, expand, delta, add, "
        "rows, attention) (no fast: no compiler)"
    )


def test_kernel_set_near_the_data_has_xla_for_kernels_of_the_device_alone() -> None:
    on_device = Kernel("fast", low_rank.delta, lambda _: None, device_only=True)
    everywhere = Kernel("anywhere", low_rank.shrink, lambda _: None)
    chosen = XLA._replace(delta=on_device, shrink=everywhere)
    assert chosen.near_the_data() == XLA._replace(shrink=everywhere)
    near = LoraSetting(make_layout(widths=WIDTHS), ("q",), MAX_RANK, chosen, chosen).at_the_data
    assert near == AttentionSetting(make_layout(widths=WIDTHS), chosen, chosen).at_the_data == chosen.near_the_data()


def test_choose_kernels_on_a_platform_without_tables_is_the_reference() -> None:
    assert choose_kernels("abacus").decode == choose_kernels("abacus").prefill == XLA
    assert XLA.attention.call is paged_attention.partial_attention
