// Products of many rows by tile registers (AMX): 16 rows of one digit meet 16 outputs of up to 64 inputs in one
// instruction. Included by integer.h, and the same whole numbers as its vectors give.
//
// A register's rows are lines of codes, or rows of x at their stride. The assembler's own spelling is used: GCC 12's
// _tile_loadconfig declares 8 of its 64 bytes as read, and its _tile_loadd no memory at all.

#define EDGE_INLINED __attribute__((always_inline))  // sums stay in registers

constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 64, SUMS = TILE_ROWS * 16;

template <int N>
struct Pair {
    static constexpr int VALUE = N;
};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int64_t num_rows, int64_t bytes) {
        rows[tile] = (uint8_t)num_rows;
        row_bytes[tile] = (uint16_t)bytes;
    }
};

// Tiles 0 and 1, 2 and 3: sums of the high and of the low digits, one pair in use while the other is read.
// 4 and 5: rows' digits, 6: codes.
inline void use_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }  // a thread without tiles is cheaper to switch
template <int TILE>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
inline void tile_load(const char* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}
template <int TILE>
inline void tile_store(int32_t* to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(int64_t(64)) : "memory");
}
// Sums += digits (signed) times codes (unsigned as in memory, or signed once decoded).
template <class C, int PAIR>
inline void tile_steps() {
    if constexpr (C::BLOCK == GROUP)
        asm volatile("tdpbssd %%tmm6, %%tmm4, %%tmm%c0\n\ttdpbssd %%tmm6, %%tmm5, %%tmm%c1" ::"i"(2 * PAIR), "i"(2 * PAIR + 1));
    else
        asm volatile("tdpbsud %%tmm6, %%tmm4, %%tmm%c0\n\ttdpbsud %%tmm6, %%tmm5, %%tmm%c1" ::"i"(2 * PAIR), "i"(2 * PAIR + 1));
}

inline Sum sums_of_row(const int32_t* sums, int row) {
    return {_mm512_load_si512(sums + 16 * row), _mm512_load_si512(sums + SUMS + 16 * row)};
}

// As finish_sum, in one step less where the high digits' sums fit 16 bits: 32 * 127 * 8 < 2^15.
template <class C>
inline V group_sum(Sum sum) {
    if constexpr (32 * 127 * C::OFFSET < 1 << 15)
        return {_mm512_cvtepi32_ps(_mm512_dpwssd_epi32(sum.b, sum.a, _mm512_set1_epi32(256)))};
    return finish_sum(sum);
}

struct RowTile {
    const char* digits;         // of its first row
    int64_t row_bytes, plane;   // from row to row, from the high digits to the low ones
    const IntegerRow* rows;
    int count;
};

// What follows keeps one pair of sums in tiles while the pair before it goes to memory: where a product's own sums are
// stored behind it, store and product wait for each other (25 ns for two of each instead of 18, a Xeon of 2023).

template <int PAIR>
inline void store_pair(int32_t* sums) {
    tile_store<2 * PAIR>(sums + 2 * PAIR * SUMS);
    tile_store<2 * PAIR + 1>(sums + (2 * PAIR + 1) * SUMS);
}

// multiply(pair, turn) and join(pair, turn) for turn in [0, turns), which is not 0; the pairs in turn.
template <class Multiply, class Join>
EDGE_INLINED inline void in_turn(int64_t turns, const Multiply& multiply, const Join& join) {
    multiply(Pair<0>{}, 0);
    for (int64_t turn = 1;; turn += 2) {
        if (turn < turns) multiply(Pair<1>{}, turn);
        join(Pair<0>{}, turn - 1);
        if (turn >= turns) return;
        if (turn + 1 < turns) multiply(Pair<0>{}, turn + 1);
        join(Pair<1>{}, turn);
        if (turn + 1 >= turns) return;
    }
}

// int8: up to 2 panels of codes beside each other, whose blocks take turns. codes[j] is where panel j's codes begin; what is
// left of them behind the last whole tile stands in rest[j], filled up to one.
template <class C>
__attribute__((noinline)) void block_tile(const RowTile& x, const char* const* codes, const char* const* rest, int64_t panels,
                                          int64_t K, V* total, int32_t* sums) {
    const int64_t turns = parts_of(K, C::BLOCK) * panels;
    const auto multiply = [&](auto pair, int64_t turn) EDGE_INLINED {
        constexpr int PAIR = decltype(pair)::VALUE;
        const int64_t begin = turn / panels * C::BLOCK, end = at_most(K, begin + C::BLOCK), j = turn % panels;
        tile_zero<2 * PAIR>();
        tile_zero<2 * PAIR + 1>();
        for (int64_t k = begin; k < end; k += TILE_INPUTS) {
            tile_load<4>(x.digits + k, x.row_bytes);
            tile_load<5>(x.digits + x.plane + k, x.row_bytes);
            tile_load<6>(k + TILE_INPUTS <= K ? codes[j] + 16 * k : rest[j], 64);
            tile_steps<C, PAIR>();
        }
    };
    const auto join = [&](auto pair, int64_t turn) EDGE_INLINED {
        constexpr int PAIR = decltype(pair)::VALUE;
        store_pair<PAIR>(sums);
        const int64_t block = turn / panels;
        V* to = total + turn % panels * TILE_ROWS;
        for (int i = 0; i < x.count; ++i) {
            Sum sum = sums_of_row(sums + 2 * PAIR * SUMS, i);
            sum.b = _mm512_add_epi32(sum.b, _mm512_set1_epi32(x.rows[i].start[block]));
            to[i] = C::join(to[i], finish_sum(sum), nullptr, 0);
        }
    };
    for (int64_t i = 0; i < panels * TILE_ROWS; ++i) total[i] = zero();
    in_turn(turns, multiply, join);
}

// int4, mxfp4: one panel, group after group. `codes` are decoded and signed, 8 lines a group.
template <class C, int ROWS>
__attribute__((noinline)) void group_tile(const RowTile& x, const char* codes, const char* panel, int64_t groups, V* totals,
                                          int32_t* sums) {
    V total[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) total[i] = zero();
    const auto multiply = [&](auto pair, int64_t g) EDGE_INLINED {
        constexpr int PAIR = decltype(pair)::VALUE;
        tile_zero<2 * PAIR>();
        tile_zero<2 * PAIR + 1>();
        tile_load<4>(x.digits + g * GROUP, x.row_bytes);
        tile_load<5>(x.digits + x.plane + g * GROUP, x.row_bytes);
        tile_load<6>(codes + g * 2 * GROUP_BYTES, 64);
        tile_steps<C, PAIR>();
    };
    const auto join = [&](auto pair, int64_t g) EDGE_INLINED {
        constexpr int PAIR = decltype(pair)::VALUE;
        store_pair<PAIR>(sums);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i)
            total[i] = C::join(total[i], group_sum<C>(sums_of_row(sums + 2 * PAIR * SUMS, i)), panel, g);
    };
    in_turn(groups, multiply, join);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) totals[i] = total[i];
}

// A panel's codes as signed bytes, a line for each four inputs.
template <class C>
void decode_panel(const char* panel, int64_t skip, int64_t groups, char* to) {
    const __m512i offset = _mm512_set1_epi8((char)C::OFFSET);
    for (int64_t g = 0; g < groups; ++g) {
        const char* from = panel + codes_at<C>(g) + skip;
        for (int64_t at = 0; at < GROUP_BYTES; at += 64, to += 128) {
            const Line nibbles = load_line(from + at);
            _mm512_store_si512(to, _mm512_sub_epi8(C::decode(low_nibbles(nibbles)).v, offset));
            _mm512_store_si512(to + 64, _mm512_sub_epi8(C::decode(high_nibbles(nibbles)).v, offset));
        }
    }
}

// As `product`, for rows that are whole numbers already: `row_bytes` apart, with room for TILE_ROWS more behind the last.
template <class C>
void tile_product(const Panels& w, const IntegerRow* rows, int64_t row_bytes, int64_t plane, float* const* out, int64_t T,
                  bool add, const char* then) {
    constexpr bool GROUPS = C::BLOCK == GROUP;
    const int64_t panels = parts_of(w.num_outputs, 16), K = w.num_inputs, row_tiles = parts_of(T, TILE_ROWS);
    const int64_t most = parts_of(T, row_tiles), groups = parts_of(K, GROUP);
    const int64_t widest = GROUPS ? 1 : 2, decoded = GROUPS ? groups * 2 * GROUP_BYTES : 2 * TILE_INPUTS * 16;
    char* memory = (char*)scratch(TILES, (size_t)(4 * SUMS * 4 + 2 * TILE_ROWS * 64 + decoded));
    int32_t* sums = (int32_t*)memory;
    V* total = (V*)(memory + 4 * SUMS * 4);
    char* codes = memory + 4 * SUMS * 4 + 2 * TILE_ROWS * 64;

    TileShapes shapes;
    for (int tile = 0; tile < 4; ++tile) shapes.set(tile, most, 64);
    for (int tile = 4; tile < 6; ++tile) shapes.set(tile, most, GROUPS ? GROUP : TILE_INPUTS);
    shapes.set(6, GROUPS ? 8 : 16, 64);
    use_shapes(shapes);
    for (int64_t p = 0; p < panels; p += widest) {
        const int64_t n = at_most(widest, panels - p);
        const char *panel = w.data + p * w.panel_bytes, *begin[2], *rest[2];
        if constexpr (GROUPS) {
            decode_panel<C>(panel, w.skip, groups, codes);
        } else {
            const int64_t whole = K / TILE_INPUTS * TILE_INPUTS, left = parts_of(K - whole, 4) * 64;
            for (int64_t j = 0; j < n; ++j) {
                begin[j] = panel + j * w.panel_bytes + C::line_at(0) + w.skip;
                char* to = codes + j * TILE_INPUTS * 16;
                rest[j] = to;
                if (left == 0) continue;
                __builtin_memset(to, 0, TILE_INPUTS * 16);
                __builtin_memcpy(to, begin[j] + 16 * whole, (size_t)left);
            }
        }
        const char* next = p + n < panels ? panel + n * w.panel_bytes : then;
        if (next)
            for (int64_t at = 0; at < n * w.panel_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            const RowTile x{rows[r0].digits, row_bytes, plane, rows + r0, (int)(r1 - r0)};
            if constexpr (!GROUPS)
                block_tile<C>(x, begin, rest, n, K, total, sums);
            else if (most <= TILE_ROWS / 2)
                group_tile<C, TILE_ROWS / 2>(x, codes, panel, groups, total, sums);
            else
                group_tile<C, TILE_ROWS>(x, codes, panel, groups, total, sums);
            for (int64_t j = 0; j < n; ++j)
                for (int64_t r = r0; r < r1; ++r)
                    put(out[r] + 16 * (p + j),
                        C::finish(total[j * TILE_ROWS + r - r0], panel + j * w.panel_bytes, rows[r].scale),
                        (int)at_most(16, w.num_outputs - 16 * (p + j)), add);
        }
    }
    release_tiles();
}
