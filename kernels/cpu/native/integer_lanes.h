// Bytes of codes and sums of whole numbers, spelled for each instruction set. Included by an integer unit behind lanes.h.
//
// A line is 64 bytes: four inputs of each of 16 outputs, as unsigned numbers. `Sum` holds 16 sums of 32 bits. What a row
// of x looks like to `step` is this file's business too: two dwords for four inputs, made by `store_digits`. All spellings
// give the same whole numbers.

constexpr int64_t DIGITS_BYTES = 2;  // of one input of a row

#if defined(EDGE_AVX512)

struct Line {
    __m512i v;
};
inline Line load_line(const char* p) { return {_mm512_loadu_si512(p)}; }
inline Line low_nibbles(Line a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Line high_nibbles(Line a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// table[nibble] for each byte
inline Line look_up(const uint8_t* table, Line nibbles) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), nibbles.v)};
}
inline __m512i all_lanes(const char* dword) {
    int32_t v;
    __builtin_memcpy(&v, dword, 4);
    return _mm512_set1_epi32(v);
}
// 16 whole numbers
struct Whole {
    __m512i v;
};
inline Whole bits_less(V a, int32_t less) { return {_mm512_sub_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(less))}; }
inline Whole add(Whole a, Whole b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline int32_t lane_sum(Whole a) { return _mm512_reduce_add_epi32(a.v); }

#if defined(EDGE_VNNI)

// x is 256 * a + b with signed digits a and b; the sums of both are kept apart until the end.
struct Sum {
    __m512i a, b;
};
inline Sum start_sum(int32_t from) { return {_mm512_setzero_si512(), _mm512_set1_epi32(from)}; }
inline void step(Sum& sum, Line w, const char* a, const char* b) {
    sum.a = _mm512_dpbusd_epi32(sum.a, w.v, all_lanes(a));
    sum.b = _mm512_dpbusd_epi32(sum.b, w.v, all_lanes(b));
}
inline V finish_sum(Sum sum) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum.a, 8), sum.b))};
}
inline void store_digits(Whole x, char* a, char* b) {
    _mm_storeu_si128((__m128i*)b, _mm512_cvtepi32_epi8(x.v));
    _mm_storeu_si128((__m128i*)a, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x.v, _mm512_set1_epi32(128)), 8)));
}
#define EDGE_DIGITS_ARE_BYTES 1

#else  // AVX-512 without VNNI

struct Sum {
    __m512i v;
};
inline Sum start_sum(int32_t from) { return {_mm512_set1_epi32(from)}; }
inline void step(Sum& sum, Line w, const char* a, const char* b) {
    const __m512i even = _mm512_and_si512(w.v, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w.v, 8);
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(even, all_lanes(a)));
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(odd, all_lanes(b)));
}
inline V finish_sum(Sum sum) { return {_mm512_cvtepi32_ps(sum.v)}; }

#endif

#elif defined(EDGE_AVX2)

struct Line {
    __m256i lo, hi;
};
inline Line load_line(const char* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline Line low_nibbles(Line a) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline Line high_nibbles(Line a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }
inline Line look_up(const uint8_t* table, Line nibbles) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(t, nibbles.lo), _mm256_shuffle_epi8(t, nibbles.hi)};
}
struct Sum {
    __m256i lo, hi;
};
inline Sum start_sum(int32_t from) { return {_mm256_set1_epi32(from), _mm256_set1_epi32(from)}; }
inline __m256i all_lanes(const char* dword) {
    int32_t v;
    __builtin_memcpy(&v, dword, 4);
    return _mm256_set1_epi32(v);
}
// In assembler, since GCC 12 forms all products of a line before it adds them, and so keeps half of the sums of 4 rows in
// memory: 4 to 10 % slower from 4 rows on.
inline void add_products(__m256i& sum, __m256i w, __m256i x) {
    __m256i product;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
}
inline void step(Sum& sum, Line w, const char* a_, const char* b_) {
    const __m256i a = all_lanes(a_), b = all_lanes(b_), even = _mm256_set1_epi16(255);
    add_products(sum.lo, _mm256_and_si256(w.lo, even), a);
    add_products(sum.hi, _mm256_and_si256(w.hi, even), a);
    add_products(sum.lo, _mm256_srli_epi16(w.lo, 8), b);
    add_products(sum.hi, _mm256_srli_epi16(w.hi, 8), b);
}
inline V finish_sum(Sum sum) { return {_mm256_cvtepi32_ps(sum.lo), _mm256_cvtepi32_ps(sum.hi)}; }
// 16 whole numbers
struct Whole {
    __m256i lo, hi;
};
inline Whole bits_less(V a, int32_t less) {
    const __m256i all = _mm256_set1_epi32(less);
    return {_mm256_sub_epi32(_mm256_castps_si256(a.lo), all), _mm256_sub_epi32(_mm256_castps_si256(a.hi), all)};
}
inline Whole add(Whole a, Whole b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline int32_t lane_sum(Whole a) {
    const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// Of each four inputs the first and third, and the second and fourth, as numbers of 16 bits. One by one they took 0.6 us for
// 512 inputs, a tenth of what a row took with 512 outputs.
inline void store_digits(Whole x, char* a, char* b) {
    const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i halves = _mm256_packs_epi32(x.lo, x.hi);  // of four numbers of lo, four of hi, and again
    const __m256i parted = _mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(apart));
    const __m256i ordered = _mm256_permutevar8x32_epi32(parted, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_storeu_si128((__m128i*)a, _mm256_castsi256_si128(ordered));
    _mm_storeu_si128((__m128i*)b, _mm256_extracti128_si256(ordered, 1));
}

#else  // portable

struct Line {
    uint8_t v[64];
};
inline Line load_line(const char* p) {
    Line r;
    __builtin_memcpy(r.v, p, 64);
    return r;
}
inline Line low_nibbles(Line a) {
    for (int i = 0; i < 64; ++i) a.v[i] &= 15;
    return a;
}
inline Line high_nibbles(Line a) {
    for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
    return a;
}
inline Line look_up(const uint8_t* table, Line nibbles) {
    for (int i = 0; i < 64; ++i) nibbles.v[i] = table[nibbles.v[i]];
    return nibbles;
}
struct Sum {
    uint32_t v[16];  // wraps on the way, as vectors do
};
inline Sum start_sum(int32_t from) {
    Sum sum;
    for (int i = 0; i < 16; ++i) sum.v[i] = (uint32_t)from;
    return sum;
}
inline void step(Sum& sum, const Line& w, const char* a, const char* b) {
    int16_t x[4];
    __builtin_memcpy(x, a, 4);
    __builtin_memcpy(x + 2, b, 4);
    for (int i = 0; i < 16; ++i)
        sum.v[i] += (uint32_t)(w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[2] + w.v[4 * i + 2] * x[1] + w.v[4 * i + 3] * x[3]);
}
inline V finish_sum(const Sum& sum) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = (float)(int32_t)sum.v[i];
    return load(lanes);
}

#endif

#if !defined(EDGE_AVX512) && !defined(EDGE_AVX2)
// 16 whole numbers
struct Whole {
    int32_t v[16];
};
inline Whole bits_less(V a, int32_t less) {
    Whole r;
    __builtin_memcpy(r.v, &a, sizeof r.v);
    for (int i = 0; i < 16; ++i) r.v[i] -= less;
    return r;
}
inline Whole add(Whole a, const Whole& b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
}
inline int32_t lane_sum(const Whole& a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += a.v[i];
    return sum;
}
#endif

#if !defined(EDGE_DIGITS_ARE_BYTES) && !defined(EDGE_AVX2)
// Of each four inputs the first and third, and the second and fourth, as numbers of 16 bits.
inline void store_digits(const Whole& x, char* a, char* b) {
    int32_t whole[16];
    __builtin_memcpy(whole, &x, sizeof whole);
    int16_t *even = (int16_t*)a, *odd = (int16_t*)b;
    for (int i = 0; i < 8; ++i) {
        even[i] = (int16_t)whole[2 * i];
        odd[i] = (int16_t)whole[2 * i + 1];
    }
}
#endif
