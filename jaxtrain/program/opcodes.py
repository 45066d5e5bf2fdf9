"""Tables of the HLO language: element types and opcodes."""

# Bits of an element; tokens and opaque handles have no bytes in a program's arrays.
BITS: dict[str, int] = (
    dict.fromkeys(["token", "opaque"], 0)
    | {"s1": 1, "u1": 1, "s2": 2, "u2": 2, "f4e2m1fn": 4, "s4": 4, "u4": 4, "pred": 8}
    | {f"{sign}{bits}": bits for sign in "su" for bits in (8, 16, 32, 64)}
    | {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
    | {f"f8{kind}": 8 for kind in ("e3m4", "e4m3", "e4m3fn", "e4m3b11fnuz", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
)

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

OPCODES: frozenset[str] = frozenset(
    """
    abs acos acosh add add-dependency after-all and asin asinh async atan2 atanh batch-norm-grad batch-norm-inference
    batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil cholesky clamp count-leading-zeros compare
    complex concatenate conditional constant convert convolution copy cosine cosh custom-call divide domain dot
    dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
    get-dimension-size get-tuple-element imag infeed iota is-finite log log-plus-one logistic map maximum minimum
    multiply negate not opt-barrier optimization-barrier or outfeed pad parameter partition-id popcnt power
    ragged-dot real recv reduce reduce-precision reduce-window remainder replica-id reshape reverse rng
    rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter
    select select-and-scatter send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine
    sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905
) | frozenset(COLLECTIVES)
