// Sixteen float lanes, spelled for each instruction set. Included by an ISA unit inside its own anonymous namespace.
//
// Every operation is one IEEE operation per lane, and `fma` is always a fused one, so all spellings give the same bits.
// The units are compiled with -ffp-contract=off: the compiler must not fuse what is not written as fma.

#if defined(EDGE_AVX512)

struct V {
    __m512 v;
};
inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
inline V load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store_part(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
// max and min give b when either is nan
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V keep_first(V a, int n, V other) { return {_mm512_mask_blend_ps(first(n), other.v, a.v)}; }
inline V zero_below(V value, V x, V low) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, low.v, _CMP_LT_OQ), value.v, _mm512_setzero_ps())};
}
inline unsigned equal_mask(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// 2^n for n held in the low bits of 1.5 * 2^23 + n
inline V power_of_two(V t) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)))};
}
inline V bf16_even(const char* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16))};
}
inline V bf16_odd(const char* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_load_si512(p), _mm512_set1_epi32((int)0xffff0000)))};
}
inline V f16_lanes(const char* p) { return {_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)p))}; }
// 2^(byte - 127)
inline V e8m0_lanes(const char* p) {
    __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)p)), 23);
    return {_mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000)))};
}

#elif defined(EDGE_AVX2)

struct V {
    __m256 lo, hi;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) {
    __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 first(int n) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
}
inline V load_part(const float* p, int n) {
    return {_mm256_maskload_ps(p, _mm256_castps_si256(first(n))),
            _mm256_maskload_ps(n > 8 ? p + 8 : p, _mm256_castps_si256(first(n - 8)))};
}
inline void store_part(float* p, V a, int n) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(first(n)), a.lo);
    if (n > 8) _mm256_maskstore_ps(p + 8, _mm256_castps_si256(first(n - 8)), a.hi);
}
inline V keep_first(V a, int n, V other) {
    return {_mm256_blendv_ps(other.lo, a.lo, first(n)), _mm256_blendv_ps(other.hi, a.hi, first(n - 8))};
}
inline V zero_below(V value, V x, V low) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, low.lo, _CMP_LT_OQ), value.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, low.hi, _CMP_LT_OQ), value.hi)};
}
inline unsigned equal_mask(V a, V b) {
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ)) |
           (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)) << 8;
}
inline __m256 power_of_two_half(__m256 t) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
}
inline V power_of_two(V t) { return {power_of_two_half(t.lo), power_of_two_half(t.hi)}; }
inline __m256i bits(const char* p) { return _mm256_load_si256((const __m256i*)p); }
inline V bf16_even(const char* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits(p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(bits(p + 32), 16))};
}
inline V bf16_odd(const char* p) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return {_mm256_castsi256_ps(_mm256_and_si256(bits(p), high)),
            _mm256_castsi256_ps(_mm256_and_si256(bits(p + 32), high))};
}
inline V f16_lanes(const char* p) {
    return {_mm256_cvtph_ps(_mm_load_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_load_si128((const __m128i*)(p + 16)))};
}
inline __m128i eight_bytes(const char* p) { return _mm_loadl_epi64((const __m128i*)p); }
inline __m256 e8m0_half(const char* p) {
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight_bytes(p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x00400000)));
}
inline V e8m0_lanes(const char* p) { return {e8m0_half(p), e8m0_half(p + 8)}; }

#else  // portable: four vectors of four; NEON has every operation, elsewhere fmaf keeps the bits

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct V {
    F4 q[4];
};
#define EDGE_EACH(expression)                 \
    V r;                                      \
    for (int i = 0; i < 4; ++i) r.q[i] = (expression); \
    return r

inline F4 all(float x) { return F4{x, x, x, x}; }
inline F4 choose(I4 mask, F4 yes, F4 no) { return (F4)(((I4)yes & mask) | ((I4)no & ~mask)); }
inline F4 fma4(F4 a, F4 b, F4 c) {
#if defined(__aarch64__)
    return (F4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    F4 r;
    for (int i = 0; i < 4; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}
inline V zero() { EDGE_EACH(all(0.0f)); }
inline V set1(float x) { EDGE_EACH(all(x)); }
inline V load(const float* p) {
    V r;
    __builtin_memcpy(&r, p, sizeof r);
    return r;
}
inline void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
inline V load_part(const float* p, int n) {
    V r = zero();
    __builtin_memcpy(&r, p, (size_t)n * sizeof(float));
    return r;
}
inline void store_part(float* p, V a, int n) { __builtin_memcpy(p, &a, (size_t)n * sizeof(float)); }
inline V fma(V a, V b, V c) { EDGE_EACH(fma4(a.q[i], b.q[i], c.q[i])); }
inline V add(V a, V b) { EDGE_EACH(a.q[i] + b.q[i]); }
inline V sub(V a, V b) { EDGE_EACH(a.q[i] - b.q[i]); }
inline V mul(V a, V b) { EDGE_EACH(a.q[i] * b.q[i]); }
inline V div(V a, V b) { EDGE_EACH(a.q[i] / b.q[i]); }
inline V max(V a, V b) { EDGE_EACH(choose(a.q[i] > b.q[i], a.q[i], b.q[i])); }
inline V min(V a, V b) { EDGE_EACH(choose(a.q[i] < b.q[i], a.q[i], b.q[i])); }
inline V keep_first(V a, int n, V other) {
    for (int i = n; i < 16; ++i) a.q[i / 4][i % 4] = other.q[i / 4][i % 4];
    return a;
}
inline V zero_below(V value, V x, V low) { EDGE_EACH(choose(x.q[i] < low.q[i], all(0.0f), value.q[i])); }
inline unsigned equal_mask(V a, V b) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (unsigned)(a.q[i / 4][i % 4] == b.q[i / 4][i % 4]) << i;
    return mask;
}
inline V power_of_two(V t) { EDGE_EACH((F4)(((U4)t.q[i] << 23) + 0x3f800000u)); }
inline U4 bits(const char* p) {
    U4 r;
    __builtin_memcpy(&r, p, sizeof r);
    return r;
}
inline V bf16_even(const char* p) { EDGE_EACH((F4)(bits(p + 16 * i) << 16)); }
inline V bf16_odd(const char* p) { EDGE_EACH((F4)(bits(p + 16 * i) & 0xffff0000u)); }
inline float f16_value(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float magnitude;
    if (rest >= 0x7c00) {  // inf, nan
        uint32_t b = 0x7f800000u | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0u);
        __builtin_memcpy(&magnitude, &b, 4);
    } else {  // exact also for subnormals: a float with exponent 112 too small, times 2^112
        uint32_t b = rest << 13;
        __builtin_memcpy(&magnitude, &b, 4);
        magnitude *= 0x1p112f;
    }
    uint32_t b;
    __builtin_memcpy(&b, &magnitude, 4);
    b |= sign;
    __builtin_memcpy(&magnitude, &b, 4);
    return magnitude;
}
inline V f16_lanes(const char* p) {
    V r;
    for (int i = 0; i < 16; ++i) {
        uint16_t h;
        __builtin_memcpy(&h, p + 2 * i, 2);
        r.q[i / 4][i % 4] = f16_value(h);
    }
    return r;
}
inline V e8m0_lanes(const char* p) {
    V r;
    for (int i = 0; i < 16; ++i) {
        const uint8_t exponent = (uint8_t)p[i];
        const uint32_t b = exponent ? (uint32_t)exponent << 23 : 0x00400000u;
        float f;
        __builtin_memcpy(&f, &b, 4);
        r.q[i / 4][i % 4] = f;
    }
    return r;
}
#undef EDGE_EACH

#endif

// Sum of the 16 lanes as a fixed tree: lane i with i+8, then i+4, i+2, i+1.
inline float lane_sum(V a) {
    float s[16];
    store(s, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
    return s[0];
}

inline float lane_max(V a) {
    float s[16];
    store(s, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
    return s[0];
}

// e^x, at most 1 ulp off in [-87.3, 88.3]; 0 below, e^88.3 above. e^r = 1 + r + r^2 p(r), |r| <= ln 2 / 2, p fitted by us.
inline V exp_lanes(V x) {
    const float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    V clamped = max(set1(-87.33f), min(set1(88.37f), x));
    V t = fma(clamped, set1(1.4426950408889634f), set1(MAGIC));
    V n = sub(t, set1(MAGIC));
    V r = fma(n, set1(-0.6931471824645996f), clamped);
    r = fma(n, set1(1.9046542121259336e-09f), r);
    V p = set1(0.00019789808720815927f);
    p = fma(p, r, set1(0.0013945199316367507f));
    p = fma(p, r, set1(0.008333500474691391f));
    p = fma(p, r, set1(0.041666287928819656f));
    p = fma(p, r, set1(0.1666666567325592f));
    p = fma(p, r, set1(0.5f));
    V y = add(fma(p, mul(r, r), r), set1(1.0f));
    return zero_below(mul(y, power_of_two(t)), x, set1(-87.33f));
}

// x / (1 + e^-x)
inline V silu_lanes(V x) { return div(x, add(set1(1.0f), exp_lanes(sub(zero(), x)))); }
