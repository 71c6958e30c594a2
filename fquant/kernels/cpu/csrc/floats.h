/* Conversions of one number between float types, for all instruction sets. */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }

INLINE uint16_t to_bf16(float x) { /* to nearest even */
    uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}
INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t to_f16(float x) { /* to nearest even, with denormals and overflow (after Maratyszcza's FP16) */
    uint32_t u = bits_of(x), doubled = u + u, bias = doubled & 0xff000000;
    float base = (float_of(u & 0x7fffffff) * 0x1p+112f) * 0x1p-110f;
    bias = bias < 0x71000000 ? 0x71000000 : bias;
    base = float_of((bias >> 1) + 0x07800000) + base;
    uint32_t v = bits_of(base), finite = (v >> 13 & 0x7c00) + (v & 0x0fff);
    return (u >> 16 & 0x8000) | (doubled > 0xff000000 ? 0x7e00 : finite);
}
INLINE float from_f16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16, doubled = u + u;
    uint32_t normal = bits_of(float_of((doubled >> 4) + 0x70000000) * 0x1p-112f);
    uint32_t tiny = bits_of(float_of(doubled >> 17 | 0x3f000000) - 0.5f);
    return float_of((u & 0x80000000) | (doubled < 0x08000000 ? tiny : normal));
}

INLINE float rounded_to(float x, const int dtype) {
    uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000; /* bf16 in few instructions */
    return dtype == F32 ? x : dtype == F16 ? from_f16(to_f16(x)) : x != x ? float_of(0x7fc00000) : float_of(rounded);
}
