/* The panels of nearest.h. */

/* Arrange codes [sets, k, d] and half [sets, k] in panels of `panel` codes; return the memory to free, NULL if there is
   none. */
static float *panels(const float *codes, const float *half, int64_t sets, int64_t k, int64_t d, int64_t panel,
                     Table *table) {
    int64_t padded = padded_to(k, panel);
    float *out, rest = 0.0f;
    if (posix_memalign((void **)&out, 64, (size_t)(sets * padded * (d + 1)) * 4)) return NULL;
    float *bias = out + sets * padded * d;
    *table = (Table){out, bias, padded, d, 0};
    for (int64_t i = 0; i < sets; i++, codes += k * d, half += k, bias += padded, out += padded * d)
        for (int64_t c = 0; c < padded; c++) {
            float *to = out + c / panel * panel * d + c % panel;
            for (int64_t j = 0; j < d; j++) {
                float code = c < k ? codes[c * d + j] : 0.0f;
                to[j * panel] = code, rest += code - code; /* 0, or NaN */
            }
            bias[c] = c < k ? half[c] : INFINITY;
            table->unordered |= bias[c] != bias[c];
        }
    table->unordered |= rest != 0.0f;
    return (float *)table->panels;
}
