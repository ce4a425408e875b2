// Products of rows and codes in whole numbers. Included by an integer unit inside its own anonymous namespace.
//
// A row of x becomes whole numbers of two digits (base 256, about 15 bits) times one scale of its own (for mxfp4, two such
// rows: the number and what is left of it). The sum of its
// products with the codes of a block of inputs is exact and fits 32 bits, so the order inside a block is free, and with it
// the instruction; blocks are joined by one chain in float32, in increasing k. Blocks and chains: kernels/reference/chain.py.
//
// Codes are unsigned in memory, OFFSET more than what they count; a sum starts at what that makes too much.

// Where codes and scales of group g stand in a panel of W.
template <class W>
inline int64_t scale_at(int64_t g) {
    return g / W::PER_LINE * (64 + W::PER_LINE * GROUP_BYTES) + g % W::PER_LINE * W::SCALE_BYTES;
}
template <class W>
inline int64_t codes_at(int64_t g) {
    return (g / W::PER_LINE + 1) * 64 + g * GROUP_BYTES;
}

struct Int8Codes {
    static constexpr int64_t BLOCK = 256, OFFSET = 128;  // 256 * 255 * 32639 < 2^31
    static constexpr int LINE_INPUTS = 4;
    static inline int64_t line_at(int64_t block) { return 64 + block * (BLOCK / LINE_INPUTS) * 64; }
    static inline V join(V total, V sum, const char*, int64_t) { return add(total, sum); }
    static inline V finish(V total, const char* panel, float scale) {
        return mul(total, mul(load((const float*)panel), set1(scale)));
    }
};
struct Int4Codes {
    static constexpr int64_t BLOCK = GROUP, OFFSET = 8;
    static constexpr int LINE_INPUTS = 8, SCALE_BYTES = 32, PER_LINE = 2;
    static inline int64_t line_at(int64_t block) { return codes_at<Int4Codes>(block); }
    static inline Line decode(Line nibbles) { return nibbles; }
    static inline V join(V total, V sum, const char* panel, int64_t block) {
        return fma(f16_lanes(panel + scale_at<Int4Codes>(block)), sum, total);
    }
    static inline V finish(V total, const char*, float scale) { return mul(total, set1(scale)); }
};
// Codes count halves.
struct Mxfp4Codes {
    static constexpr int64_t BLOCK = GROUP, OFFSET = 12;
    static constexpr int LINE_INPUTS = 8, SCALE_BYTES = 16, PER_LINE = 4;
    static inline int64_t line_at(int64_t block) { return codes_at<Mxfp4Codes>(block); }
    static inline Line decode(Line nibbles) {
        static const uint8_t HALVES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return look_up(HALVES, nibbles);
    }
    static inline V join(V total, V sum, const char* panel, int64_t block) {
        return fma(e8m0_lanes(panel + scale_at<Mxfp4Codes>(block)), sum, total);
    }
    static inline V finish(V total, const char*, float scale) { return mul(total, set1(0.5f * scale)); }
};

// Rows x panels of sums that fit the registers.
#if defined(EDGE_VNNI)
constexpr int MAX_ROWS = 8, MAX_PANELS = 8;
constexpr int panels_for(int rows) {
    return rows == 1 ? 8 : rows == 2 ? 6 : rows == 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1;
}
#elif defined(EDGE_AVX512)
constexpr int MAX_ROWS = 8, MAX_PANELS = 8;
constexpr int panels_for(int rows) { return rows <= 2 ? 8 : rows == 3 ? 6 : rows == 4 ? 5 : rows <= 6 ? 4 : 2; }
#else
// Two rows of two panels would fit too, and are 12 % slower than two of one: their codes spread to eight more registers.
constexpr int MAX_ROWS = 4, MAX_PANELS = 2;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
#endif

struct IntegerTile {
    const char* x[MAX_ROWS];         // the first digits of a row; the second ones lie `plane` behind
    const int32_t* start[MAX_ROWS];  // what the sums of each block start at
    float scale[MAX_ROWS];
    const char* w[MAX_PANELS];
    float* out[MAX_ROWS];
    int64_t plane;
    int64_t inputs;
    int64_t skip;    // bytes of codes before the first input
    int64_t ahead;   // bytes from a panel to the one that will be read when this tile is done; 0 if there is none
    int last_lanes;  // lanes of the last panel that exist
    bool add;
};

template <class C, int ROWS, int PANELS>
inline void line_step(Sum (&sum)[ROWS][PANELS], const Line (&w)[PANELS], const char* const (&x)[ROWS], int64_t at,
                      int64_t plane) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) step(sum[i][j], w[j], x[i] + at, x[i] + at + plane);
}

template <class C, int ROWS, int PANELS>
__attribute__((noinline)) void integer_tile(const IntegerTile& tile) {
    const char* x[ROWS];
    const char* w[PANELS];
    V total[ROWS][PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) x[i] = tile.x[i];
#pragma GCC unroll 8
    for (int j = 0; j < PANELS; ++j) w[j] = tile.w[j];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) total[i][j] = zero();

    const int64_t plane = tile.plane, skip = tile.skip, ahead = tile.ahead;
    for (int64_t block = 0; block * C::BLOCK < tile.inputs; ++block) {
        Sum sum[ROWS][PANELS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) sum[i][j] = start_sum(tile.start[i][block]);
        int64_t k = block * C::BLOCK, line = C::line_at(block);
        const int64_t end = C::BLOCK == GROUP ? k + GROUP : at_most(tile.inputs, k + C::BLOCK);
        for (; k < end; k += C::LINE_INPUTS, line += 64) {
            Line codes[PANELS], part[PANELS];
            // The next tile's codes on their way to the first-level cache, which beat the second-level one by 4 to 7 %, and no
            // fetching by 9 to 18 % (int4, experts of 0.9 MB, 1 to 16 rows, a Xeon of 2023).
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) __builtin_prefetch(w[j] + line + ahead, 0, 3);
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) codes[j] = load_line(w[j] + line + skip);
            if constexpr (C::LINE_INPUTS == 4) {
                line_step<C, ROWS, PANELS>(sum, codes, x, k, plane);
            } else {
#pragma GCC unroll 8
                for (int j = 0; j < PANELS; ++j) part[j] = C::decode(low_nibbles(codes[j]));
                line_step<C, ROWS, PANELS>(sum, part, x, k, plane);
#pragma GCC unroll 8
                for (int j = 0; j < PANELS; ++j) part[j] = C::decode(high_nibbles(codes[j]));
                line_step<C, ROWS, PANELS>(sum, part, x, k + 4, plane);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j)
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) total[i][j] = C::join(total[i][j], finish_sum(sum[i][j]), w[j], block);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j)
            put(tile.out[i] + 16 * j, C::finish(total[i][j], w[j], tile.scale[i]), j + 1 < PANELS ? 16 : tile.last_lanes,
                tile.add);
}

template <class C, int ROWS>
void tile_of(int panels, const IntegerTile& tile) {
    constexpr int MOST = panels_for(ROWS);
    switch (panels) {
        case 1: integer_tile<C, ROWS, 1>(tile); break;
        case 2: if constexpr (MOST >= 2) integer_tile<C, ROWS, 2>(tile); break;
        case 3: if constexpr (MOST >= 3) integer_tile<C, ROWS, 3>(tile); break;
        case 4: if constexpr (MOST >= 4) integer_tile<C, ROWS, 4>(tile); break;
        case 5: if constexpr (MOST >= 5) integer_tile<C, ROWS, 5>(tile); break;
        case 6: if constexpr (MOST >= 6) integer_tile<C, ROWS, 6>(tile); break;
        case 7: if constexpr (MOST >= 7) integer_tile<C, ROWS, 7>(tile); break;
        case 8: if constexpr (MOST >= 8) integer_tile<C, ROWS, 8>(tile); break;
    }
}

template <class C>
void any_tile(int rows, int panels, const IntegerTile& tile) {
    switch (rows) {
        case 1: tile_of<C, 1>(panels, tile); break;
        case 2: tile_of<C, 2>(panels, tile); break;
        case 3: tile_of<C, 3>(panels, tile); break;
        case 4: tile_of<C, 4>(panels, tile); break;
        case 5: if constexpr (MAX_ROWS >= 5) tile_of<C, 5>(panels, tile); break;
        case 6: if constexpr (MAX_ROWS >= 6) tile_of<C, 6>(panels, tile); break;
        case 7: if constexpr (MAX_ROWS >= 7) tile_of<C, 7>(panels, tile); break;
        case 8: if constexpr (MAX_ROWS >= 8) tile_of<C, 8>(panels, tile); break;
    }
}

// A row as whole numbers, in scratch memory: digits up to a multiple of 32 inputs, then where its sums start.
struct IntegerRow {
    char* digits;
    int32_t* start;
    float scale;
};

// Of a row: what one unit of its whole numbers stands for, and how a number becomes whole.
struct WholeScale {
    float scale, inverse;
    bool finite;
    V whole(V v) const { return sub(add(mul(v, set1(inverse)), set1(MAGIC)), set1(MAGIC)); }
    static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
};

constexpr float LARGEST = 32639.0f;  // 127 * 256 + 127, what two signed digits of base 256 reach on both sides
constexpr float LEAST = 1e-30f;      // a row that stays below counts as zeros

// A row with a number that is not finite gets a scale of nan, and so gives nan everywhere.
inline WholeScale scale_of(const float* x, int64_t K) {
    V most[2] = {zero(), zero()}, odd[2] = {zero(), zero()};
    const auto see = [&](int64_t k, int chain) {
        const V v = load_lanes(x + k, K - k);
        most[chain] = max(max(v, sub(zero(), v)), most[chain]);
        odd[chain] = add(odd[chain], sub(v, v));  // nan for nan and inf
    };
    for (int64_t k = 0; k < K; k += 32) {
        see(k, 0);
        if (k + 16 < K) see(k + 16, 1);
    }
    const float highest = lane_max(max(most[0], most[1]));
    const bool finite = lane_sum(add(odd[0], odd[1])) == 0.0f, some = highest >= LEAST;
    return {!finite ? __builtin_nanf("") : some ? highest / LARGEST : 0.0f, finite && some ? LARGEST / highest : 0.0f, finite};
}

// x is near digits * scale. Without STARTS codes are signed, and no sum starts at anything.
template <class C, bool STARTS = true>
void to_integers(const float* x, int64_t K, int64_t plane, IntegerRow& row) {
    const WholeScale by = scale_of(x, K);
    row.scale = by.scale;
    const V inverse = set1(by.inverse), magic = set1(WholeScale::MAGIC);
    const auto store_whole = [&](int64_t k) {
        const V v = !by.finite || k >= K ? zero() : load_lanes(x + k, K - k);
        const Whole whole = bits_less(add(mul(v, inverse), magic), 0x4b400000);
        store_digits(whole, row.digits + k, row.digits + plane + k);
        return whole;
    };
    for (int64_t k = 0; k < plane;) {
        const int64_t end = at_most(plane, k + C::BLOCK);
        Whole sum = store_whole(k);
        for (k += 16; k < end; k += 16) sum = add(sum, store_whole(k));
        if constexpr (STARTS) row.start[(end - 1) / C::BLOCK] = -(int32_t)C::OFFSET * lane_sum(sum);
    }
}

#if defined(EDGE_AMX)
#include "integer_tiles.h"
// Tiles against vectors on a loaded Xeon of 2023, 4, 8, 16 and 48 rows: int8 0.7, 1.5, 3.2, 3.5; int4 0.5, 1.0, 1.8, 2.0; mxfp4
// 0.6, 1.5, 1.9, 2.1 times as fast.
constexpr int64_t FEWEST_TILE_ROWS = 8, SPARE_ROWS = TILE_ROWS;
#else
constexpr int64_t SPARE_ROWS = 0;
#endif

// out[i][0..N) (=|+=) x[i] W^T for rows given by pointers. Panels outside, rows inside: weights are read once. `then` is
// what will be read next, null if nothing is known.
template <class C>
void product(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    constexpr int64_t WHOLE = C::BLOCK == GROUP ? GROUP : 64;  // inputs that a row's digits are filled up to
    const int64_t panels = parts_of(w.num_outputs, 16), K = w.num_inputs, plane = parts_of(K, WHOLE) * WHOLE;
    const int64_t row_tiles = parts_of(T, MAX_ROWS);
    const int widest = panels_for((int)parts_of(T, row_tiles));
    const int64_t groups = parts_of(panels, widest);
    const int64_t row_bytes = parts_of(DIGITS_BYTES * plane + 4 * parts_of(K, C::BLOCK), 64) * 64;
    const int64_t room = (T + SPARE_ROWS) * row_bytes;
    char* memory = (char*)scratch(DIGITS, (size_t)(room + T * (int64_t)sizeof(IntegerRow)));
    IntegerRow* rows = (IntegerRow*)(memory + room);
    for (int64_t t = 0; t < T; ++t) {
        rows[t].digits = memory + t * row_bytes;
        rows[t].start = (int32_t*)(rows[t].digits + DIGITS_BYTES * plane);
#if defined(EDGE_AMX)
        if (C::BLOCK == GROUP && T >= FEWEST_TILE_ROWS)
            to_integers<C, false>(x[t], K, plane, rows[t]);
        else
#endif
            to_integers<C>(x[t], K, plane, rows[t]);
    }
#if defined(EDGE_AMX)
    if (T >= FEWEST_TILE_ROWS && K > 0) return tile_product<C>(w, rows, row_bytes, plane, out, T, add, then);
#endif
    IntegerTile tile;
    tile.plane = plane;
    tile.inputs = K;
    tile.skip = w.skip;
    tile.add = add;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), p1 = part_begin(panels, groups, g + 1);
        for (int64_t p = p0; p < p1; ++p) tile.w[p - p0] = w.data + p * w.panel_bytes;
        tile.last_lanes = (int)at_most(16, w.num_outputs - 16 * (p1 - 1));
        tile.ahead = g + 1 < groups ? (p1 - p0) * w.panel_bytes : then ? then - tile.w[0] : 0;
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            for (int64_t r = r0; r < r1; ++r) {
                tile.x[r - r0] = rows[r].digits;
                tile.start[r - r0] = rows[r].start;
                tile.scale[r - r0] = rows[r].scale;
                tile.out[r - r0] = out[r] + 16 * p0;
            }
            any_tile<C>((int)(r1 - r0), (int)(p1 - p0), tile);
            tile.ahead = 0;
        }
    }
}

// rest = x less what its whole numbers stand for, rounded once.
inline void rest_of(const float* x, int64_t K, float* rest) {
    const WholeScale by = scale_of(x, K);
    for (int64_t k = 0; k < K; k += 16) {
        const V v = load_lanes(x + k, K - k);
        store_lanes(rest + k, fma(sub(zero(), by.whole(v)), set1(by.scale), v), K - k);
    }
}

// A checkpoint's own mxfp4 weights are the model: their rows count to 30 bits, as the sum of two products.
void product_of_both(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    const int64_t K = w.num_inputs, N = w.num_outputs, row_floats = K + (add ? N : 0);
    char* memory = (char*)scratch(REST, (size_t)T * (row_floats * sizeof(float) + 2 * sizeof(float*)));
    const float** rest = (const float**)memory;
    float** sums = (float**)memory + T;
    float* floats = (float*)(sums + T);
    for (int64_t t = 0; t < T; ++t) {
        float* of_row = floats + t * row_floats;
        rest_of(x[t], K, of_row);
        rest[t] = of_row;
        sums[t] = add ? of_row + K : out[t];
    }
    product<Mxfp4Codes>(w, x, sums, T, false, w.data);
    product<Mxfp4Codes>(w, rest, sums, T, true, then);
    if (!add) return;
    for (int64_t t = 0; t < T; ++t)
        for (int64_t n = 0; n < N; ++n) out[t][n] += sums[t][n];
}

void product_of_codes(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    switch (w.format) {
        case Q8: product<Int8Codes>(w, x, out, T, add, then); break;
        case Q4: product<Int4Codes>(w, x, out, T, add, then); break;
        case MXFP4: product_of_both(w, x, out, T, add, then); break;
    }
}
