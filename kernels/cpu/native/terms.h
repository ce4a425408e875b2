// Products of bfloat16 weights with rows that are sums of two bfloat16 terms. Included by an integer unit inside its own
// anonymous namespace; kernels/reference/bfloat16x2.py defines them.
//
// A row's first term is its number rounded to bfloat16, the second what that leaves of it, rounded likewise. A term's
// products are summed as TDPBF16PS sums them: of every 32 inputs the even ones in one chain and the odd ones in another,
// both from 0; these two are added, and then to the total. Numbers below 2^-126 count as zeros. The terms' totals are
// added last. So processors with tile registers and those without give the same bits.

constexpr int64_t TERM_BLOCK = 32;

// Small numbers are zeros as long as this stands, in what is read and in what is written: tile registers know no others.
class FlushSmall {
  public:
#if defined(__x86_64__)
    FlushSmall() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }  // flush to zero, denormals are zeros
    ~FlushSmall() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushSmall() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" ::"r"(before_ | 1ull << 24));
    }
    ~FlushSmall() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

  private:
    uint64_t before_;
#else
    FlushSmall() {}
#endif
};

// To bfloat16, ties to even; a nan stays one.
inline uint32_t bf16_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded) & 0xffff0000u;
}
inline float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

#if defined(EDGE_AMX)

// A row's terms as two lines of bfloat16, `plane` bytes apart, with zeros up to `padded` inputs.
inline void to_term_lines(const float* x, int64_t K, int64_t padded, int64_t plane, char* to) {
    uint16_t *first = (uint16_t*)to, *second = (uint16_t*)(to + plane);
    for (int64_t k = 0; k < K; ++k) {
        const uint32_t high = bf16_bits(x[k]);
        first[k] = (uint16_t)(high >> 16);
        second[k] = (uint16_t)(bf16_bits(x[k] - as_float(high)) >> 16);
    }
    for (int64_t k = K; k < padded; ++k) first[k] = second[k] = 0;
}

// Sums of tile registers 0 and 2 with the first terms, 1 and 3 with the second ones: 16 rows by 16 outputs of two panels.
// 4, 5: the terms of 16 rows; 6, 7: 32 inputs of a panel each.
template <int PANELS>
inline void term_steps() {
    asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm6, %tmm5, %tmm1");
    if constexpr (PANELS == 2) asm volatile("tdpbf16ps %tmm7, %tmm4, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
}

struct TermTile {
    const char* terms;  // of its first row
    int64_t row_bytes, plane;
    int64_t blocks, whole;   // of TERM_BLOCK inputs, and how many of them are whole
    const char *w[2], *rest[2];
    int64_t ahead;  // bytes from a panel to the one that will be read when this tile is done; 0 if there is none
};

template <int PANELS>
__attribute__((noinline)) void term_tile(const TermTile& tile, int32_t* sums) {
    constexpr int64_t BYTES = TERM_BLOCK * 32;
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (PANELS == 2) {
        tile_zero<2>();
        tile_zero<3>();
    }
    for (int64_t b = 0; b < tile.blocks; ++b) {
        tile_load<4>(tile.terms + b * 64, tile.row_bytes);
        tile_load<5>(tile.terms + tile.plane + b * 64, tile.row_bytes);
        tile_load<6>(b < tile.whole ? tile.w[0] + b * BYTES : tile.rest[0], 64);
        if constexpr (PANELS == 2) tile_load<7>(b < tile.whole ? tile.w[1] + b * BYTES : tile.rest[1], 64);
        if (tile.ahead)
            for (int64_t at = 0; at < BYTES; at += 64)
                for (int j = 0; j < PANELS; ++j) __builtin_prefetch(tile.w[j] + b * BYTES + at + tile.ahead, 0, 2);
        term_steps<PANELS>();
    }
    tile_store<0>(sums);
    tile_store<1>(sums + SUMS);
    if constexpr (PANELS == 2) {
        tile_store<2>(sums + 2 * SUMS);
        tile_store<3>(sums + 3 * SUMS);
    }
}

void product_of_terms(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add_out, const char* then) {
    const FlushSmall flush;
    const int64_t K = w.num_inputs, panels = parts_of(w.num_outputs, 16), row_tiles = parts_of(T, TILE_ROWS);
    const int64_t blocks = parts_of(K, TERM_BLOCK), whole = K / TERM_BLOCK, most = parts_of(T, row_tiles);
    const int64_t row_bytes = blocks * TERM_BLOCK * 2, plane = (T + TILE_ROWS) * row_bytes;
    char* terms = (char*)scratch(DIGITS, (size_t)(2 * plane));
    for (int64_t t = 0; t < T; ++t) to_term_lines(x[t], K, blocks * TERM_BLOCK, plane, terms + t * row_bytes);
    char* memory = (char*)scratch(TILES, (size_t)(4 * SUMS * 4 + 2 * TERM_BLOCK * 32));
    int32_t* sums = (int32_t*)memory;
    char* rest = memory + 4 * SUMS * 4;

    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, most, 64);
    for (int tile = 6; tile < 8; ++tile) shapes.set(tile, 16, 64);
    use_shapes(shapes);
    TermTile tile;
    tile.row_bytes = row_bytes;
    tile.plane = plane;
    tile.blocks = blocks;
    tile.whole = whole;
    for (int64_t p = 0; p < panels; p += 2) {
        const int64_t n = at_most(2, panels - p), left = parts_of(K - whole * TERM_BLOCK, 2) * 64;
        for (int64_t j = 0; j < n; ++j) {
            tile.w[j] = w.data + (p + j) * w.panel_bytes;
            char* to = rest + j * TERM_BLOCK * 32;
            tile.rest[j] = to;
            if (left == 0) continue;
            __builtin_memset(to, 0, TERM_BLOCK * 32);
            __builtin_memcpy(to, tile.w[j] + whole * TERM_BLOCK * 32, (size_t)left);
        }
        tile.ahead = p + n < panels ? n * w.panel_bytes : then ? then - tile.w[0] : 0;
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            tile.terms = terms + r0 * row_bytes;
            if (n == 2)
                term_tile<2>(tile, sums);
            else
                term_tile<1>(tile, sums);
            tile.ahead = 0;
            for (int64_t j = 0; j < n; ++j)
                for (int64_t r = r0; r < r1; ++r) {
                    const float* sum = (const float*)(sums + 2 * j * SUMS) + 16 * (r - r0);
                    put(out[r] + 16 * (p + j), add(load(sum), load(sum + SUMS)),
                        (int)at_most(16, w.num_outputs - 16 * (p + j)), add_out);
                }
        }
    }
    release_tiles();
}

#else

// A row's terms for each two inputs: first term of the even and of the odd one, second terms likewise.
inline void to_term_pairs(const float* x, int64_t K, float* to) {
    for (int64_t k = 0; k < K; ++k) {
        const float high = as_float(bf16_bits(x[k]));
        float* at = to + k / 2 * 4 + k % 2;
        at[0] = high;
        at[2] = as_float(bf16_bits(x[k] - high));
    }
    if (K & 1) to[K / 2 * 4 + 1] = to[K / 2 * 4 + 3] = 0.0f;
}

#if defined(EDGE_AVX512)
constexpr int TERM_ROWS = 4;  // 6 sums a row, of 32 registers
#elif defined(EDGE_AVX2)
constexpr int TERM_ROWS = 1;
#else
constexpr int TERM_ROWS = 2;
#endif

template <int ROWS>
__attribute__((noinline)) void term_rows(const float* const* terms, const char* w, int64_t K, int64_t ahead, V* out) {
    V first[ROWS], second[ROWS];
    for (int i = 0; i < ROWS; ++i) first[i] = second[i] = zero();
    for (int64_t k = 0; k < K; k += TERM_BLOCK) {
        V sums[ROWS][4];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sums[i][j] = zero();
        const int64_t end = parts_of(at_most(K, k + TERM_BLOCK), 2);
        for (int64_t pair = k / 2; pair < end; ++pair) {
            const char* at = w + pair * 64;
            __builtin_prefetch(at + ahead, 0, 3);
            const V even = bf16_even(at), odd = bf16_odd(at);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; ++i) {
                const float* x = terms[i] + 4 * pair;
                sums[i][0] = fma(set1(x[0]), even, sums[i][0]);
                sums[i][1] = fma(set1(x[1]), odd, sums[i][1]);
                sums[i][2] = fma(set1(x[2]), even, sums[i][2]);
                sums[i][3] = fma(set1(x[3]), odd, sums[i][3]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) {
            first[i] = add(first[i], add(sums[i][0], sums[i][1]));
            second[i] = add(second[i], add(sums[i][2], sums[i][3]));
        }
    }
    for (int i = 0; i < ROWS; ++i) out[i] = add(first[i], second[i]);
}

void term_rows_of(int rows, const float* const* terms, const char* w, int64_t K, int64_t ahead, V* out) {
    switch (rows) {
        case 1: term_rows<1>(terms, w, K, ahead, out); break;
        case 2: if constexpr (TERM_ROWS >= 2) term_rows<2>(terms, w, K, ahead, out); break;
        case 3: if constexpr (TERM_ROWS >= 3) term_rows<3>(terms, w, K, ahead, out); break;
        case 4: if constexpr (TERM_ROWS >= 4) term_rows<4>(terms, w, K, ahead, out); break;
    }
}

void product_of_terms(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add_out, const char* then) {
    const FlushSmall flush;
    const int64_t K = w.num_inputs, panels = parts_of(w.num_outputs, 16), row_tiles = parts_of(T, TERM_ROWS);
    const int64_t row_floats = parts_of(K, 2) * 4;
    float* terms = (float*)scratch(DIGITS, (size_t)(T * row_floats) * sizeof(float));
    for (int64_t t = 0; t < T; ++t) to_term_pairs(x[t], K, terms + t * row_floats);
    const float* rows[TERM_ROWS];
    V dots[TERM_ROWS];
    for (int64_t p = 0; p < panels; ++p) {
        const char* panel = w.data + p * w.panel_bytes;
        int64_t ahead = p + 1 < panels ? w.panel_bytes : then ? then - panel : 0;
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            for (int64_t r = r0; r < r1; ++r) rows[r - r0] = terms + r * row_floats;
            term_rows_of((int)(r1 - r0), rows, panel, K, ahead, dots);
            ahead = 0;
            for (int64_t r = r0; r < r1; ++r)
                put(out[r] + 16 * p, dots[r - r0], (int)at_most(16, w.num_outputs - 16 * p), add_out);
        }
    }
}

#endif
