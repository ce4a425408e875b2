// Codes of a weight, straight into its panels. Included by an ISA unit inside its own anonymous namespace.
//
// The lanes are 16 outputs, so what a group of inputs adds up to needs no sum over lanes. Codes and scales are those of
// kernels/reference/int8.py, int4.py and mxfp4.py, to the bit: nothing is fused, and sums are the tree defined there.

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even
inline V rounded(V v) { return sub(add(v, set1(ROUNDER)), set1(ROUNDER)); }

inline float widened_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = rest << 13;
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude = rest >= 0x7c00 ? __builtin_inff() : magnitude * 0x1p112f;  // a nan counts as not finite all the same
    __builtin_memcpy(&bits, &magnitude, 4);
    bits |= sign;
    __builtin_memcpy(&magnitude, &bits, 4);
    return magnitude;
}

// The nearest float16, ties to even; inf from 65520 on.
inline uint16_t nearest_f16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24, which the addition rounds to
        float steps;
        __builtin_memcpy(&steps, &magnitude, 4);
        steps = steps * 0x1p24f + 8388608.0f;
        uint32_t whole;
        __builtin_memcpy(&whole, &steps, 4);
        return (uint16_t)(sign | (whole - 0x4b000000));
    }
    const uint32_t even = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (even - 0x38000000) >> 13);
}

// Up to 16 rows of a weight, turned round: [inputs][16] float32 from input k on; 0 where there is no row or input.
void turn_rows(const QuantiseCall& call, int64_t row, int64_t rows, int64_t k, int64_t inputs, float* to) {
    const int64_t there = at_most(inputs, call.K - k);
    if (rows < 16 || there < inputs) __builtin_memset(to, 0, (size_t)inputs * 64);
    for (int64_t n = 0; n < rows; ++n) {
        const int64_t at = (row + n) * call.stride + k;
        const uint16_t* halves = (const uint16_t*)call.rows + at;
        switch (call.stored) {
            case F32:
                for (int64_t i = 0; i < there; ++i) to[16 * i + n] = ((const float*)call.rows)[at + i];
                break;
            case F16:
                for (int64_t i = 0; i < there; ++i) to[16 * i + n] = widened_f16(halves[i]);
                break;
            default:
                for (int64_t i = 0; i < there; ++i) {
                    const uint32_t bits = (uint32_t)halves[i] << 16;
                    __builtin_memcpy(to + 16 * i + n, &bits, 4);
                }
        }
    }
}

// Codes as numbers of 32 bits.
inline void store_codes(V codes, int32_t offset, int32_t* to) {
    const V shifted = add(codes, set1(ROUNDER));
    __builtin_memcpy(to, &shifted, 64);
    for (int i = 0; i < 16; ++i) to[i] -= 0x4b400000 - offset;
}

// Lanes [lane, lane + rows) of a line of 16 dwords; the dwords belong to rows 0..rows.
inline void put_dwords(char* line, int64_t lane, int64_t rows, const uint32_t* dwords) {
    __builtin_memcpy(line + 4 * lane, dwords, (size_t)rows * 4);
}

// The rows of one panel; `lane` is the first one's. False, with anything written, if a number is not finite.
bool int8_panel(const QuantiseCall& call, char* panel, int64_t lane, int64_t row, int64_t rows) {
    constexpr int64_t INPUTS = 64;
    alignas(64) float turned[INPUTS * 16];
    V most = zero(), odd = zero();
    for (int64_t k = 0; k < call.K; k += INPUTS) {
        turn_rows(call, row, rows, k, INPUTS, turned);
        for (int64_t i = 0; i < INPUTS; ++i) {
            const V v = load(turned + 16 * i);
            most = max(max(v, sub(zero(), v)), most);
            odd = add(odd, sub(v, v));
        }
    }
    if (lane_sum(odd) != 0.0f) return false;
    const V scales = div(most, set1(127.0f)), divisor = max(scales, set1(1.17549435e-38f));
    alignas(64) float scale[16];
    store(scale, scales);
    __builtin_memcpy(panel + 4 * lane, scale, (size_t)rows * 4);
    for (int64_t k = 0; k < call.K; k += INPUTS) {
        turn_rows(call, row, rows, k, INPUTS, turned);
        const int64_t lines = at_most(INPUTS, parts_of(call.K - k, 4) * 4) / 4;
        for (int64_t line = 0; line < lines; ++line) {
            uint32_t dwords[16] = {};
            for (int i = 0; i < 4; ++i) {
                int32_t codes[16];
                const V each = rounded(div(load(turned + 16 * (4 * line + i)), divisor));
                store_codes(max(set1(-127.0f), min(set1(127.0f), each)), 128, codes);
                for (int n = 0; n < 16; ++n) dwords[n] |= (uint32_t)codes[n] << 8 * i;
            }
            put_dwords(panel + 64 + (k / 4 + line) * 64, lane, rows, dwords);
        }
    }
    // Inputs that fill up the last line are written as no code at all.
    for (int64_t k = call.K; k % 4 != 0; ++k)
        for (int64_t n = 0; n < rows; ++n) panel[64 + k / 4 * 64 + (lane + n) * 4 + k % 4] = 0;
    return true;
}

// A group's codes [32][16], unsigned, into its 4 lines: inputs 0 to 3 of eight in the low halves, 4 to 7 in the high ones.
inline void put_group(char* lines, int64_t lane, int64_t rows, const int32_t (*codes)[16]) {
    for (int line = 0; line < 4; ++line) {
        uint32_t dwords[16] = {};
        for (int i = 0; i < 8; ++i)
            for (int n = 0; n < 16; ++n) dwords[n] |= (uint32_t)codes[8 * line + i][n] << (i % 4 * 8 + i / 4 * 4);
        put_dwords(lines + 64 * line, lane, rows, dwords);
    }
}

// Codes [32][16] of one scale for each lane, plus 8, and what they are off by: squares, summed as the tree over 32 inputs.
inline V int4_codes(const float* turned, const float* scale, int32_t (*codes)[16]) {
    alignas(64) float divisors[16];
    for (int n = 0; n < 16; ++n) divisors[n] = scale[n] == 0.0f ? __builtin_inff() : scale[n];
    const V divisor = load(divisors), wide = load(scale);
    V off[16];
    for (int k = 0; k < 32; ++k) {
        const V v = load(turned + 16 * k);
        const V code = max(set1(-8.0f), min(set1(7.0f), rounded(div(v, divisor))));
        store_codes(code, 8, codes[k]);
        const V error = sub(mul(code, wide), v), square = mul(error, error);
        off[k % 16] = k < 16 ? square : add(off[k % 16], square);
    }
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) off[i] = add(off[i], off[i + half]);
    return off[0];
}

bool int4_panel(const QuantiseCall& call, char* panel, int64_t lane, int64_t row, int64_t rows) {
    alignas(64) float turned[GROUP * 16], low[16], high[16], scale[2][16], off[2][16];
    int32_t codes[2][GROUP][16];
    V odd = zero();
    for (int64_t g = 0; g < parts_of(call.K, GROUP); ++g) {
        turn_rows(call, row, rows, g * GROUP, GROUP, turned);
        V least = load(turned), most = least;
        for (int k = 0; k < GROUP; ++k) {
            const V v = load(turned + 16 * k);
            least = min(least, v);
            most = max(most, v);
            odd = add(odd, sub(v, v));
        }
        store(low, least);
        store(high, most);
        uint16_t halves[2][16];
        bool finite = true;
        for (int n = 0; n < 16; ++n) {
            const float largest = -low[n] > high[n] ? low[n] : high[n];
            halves[0][n] = nearest_f16(largest / -8.0f);
            halves[1][n] = nearest_f16(__builtin_fabsf(largest) / 7.0f);
            for (int i = 0; i < 2; ++i) {
                scale[i][n] = widened_f16(halves[i][n]);
                finite = finite && (halves[i][n] & 0x7c00) != 0x7c00;
            }
        }
        if (!finite) return false;
        for (int i = 0; i < 2; ++i) store(off[i], int4_codes(turned, scale[i], codes[i]));
        for (int n = 0; n < 16; ++n) {
            if (!(off[1][n] < off[0][n])) continue;
            halves[0][n] = halves[1][n];
            for (int k = 0; k < GROUP; ++k) codes[0][k][n] = codes[1][k][n];
        }
        char* line = panel + g / 2 * (64 + 2 * GROUP_BYTES);
        __builtin_memcpy(line + (g % 2 * 16 + lane) * 2, halves[0], (size_t)rows * 2);
        put_group(line + 64 + g % 2 * GROUP_BYTES, lane, rows, codes[0]);
    }
    return lane_sum(odd) == 0.0f;
}

bool mxfp4_panel(const QuantiseCall& call, char* panel, int64_t lane, int64_t row, int64_t rows) {
    alignas(64) float turned[GROUP * 16], most[16], power[16];
    int32_t codes[GROUP][16];
    V odd = zero();
    for (int64_t g = 0; g < parts_of(call.K, GROUP); ++g) {
        turn_rows(call, row, rows, g * GROUP, GROUP, turned);
        V largest = zero();
        for (int k = 0; k < GROUP; ++k) {
            const V v = load(turned + 16 * k);
            largest = max(largest, max(v, sub(zero(), v)));
            odd = add(odd, sub(v, v));
        }
        store(most, largest);
        uint8_t exponents[16];
        for (int n = 0; n < 16; ++n) {  // the power of two that puts the largest magnitude in [4, 8)
            uint32_t bits;
            __builtin_memcpy(&bits, most + n, 4);
            int exponent = bits == 0 ? 0 : (int)(bits >> 23) - 129;
            if (exponent < -126) exponent = -126;
            exponents[n] = (uint8_t)(exponent + 127);
            bits = (uint32_t)(127 - exponent) << 23;  // never 128 or more: a float32 stays below 2^128
            __builtin_memcpy(power + n, &bits, 4);
        }
        const V by = load(power);
        for (int k = 0; k < GROUP; ++k) {
            alignas(64) float scaled[16];
            store(scaled, mul(load(turned + 16 * k), by));
            for (int n = 0; n < 16; ++n) {
                const float m = __builtin_fabsf(scaled[n]);  // to the nearest step, ties to the even code
                const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
                codes[k][n] = code + (turned[16 * k + n] < 0.0f ? 8 : 0);
            }
        }
        char* line = panel + g / 4 * (64 + 4 * GROUP_BYTES);
        __builtin_memcpy(line + g % 4 * 16 + lane, exponents, (size_t)rows);
        put_group(line + 64 + g % 4 * GROUP_BYTES, lane, rows, codes);
    }
    return lane_sum(odd) == 0.0f;
}

// False too for a format that has no codes.
bool quantise(const QuantiseCall& call) {
    for (int64_t row = 0; row < call.count;) {
        const int64_t at = call.first + row, lane = at % 16, rows = at_most(16 - lane, call.count - row);
        char* panel = call.panels + at / 16 * call.panel_bytes;
        switch (call.format) {
            case Q8: if (!int8_panel(call, panel, lane, row, rows)) return false; break;
            case Q4: if (!int4_panel(call, panel, lane, row, rows)) return false; break;
            case MXFP4: if (!mxfp4_panel(call, panel, lane, row, rows)) return false; break;
            default: return false;
        }
        row += rows;
    }
    return true;
}
