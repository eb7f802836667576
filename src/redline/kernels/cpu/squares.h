// Lines to columns: 16 x 16 words, in place.

#define SIDE 16
#if LANES == 16
#define SWAPPED(stage, first, second) \
    for (int i = 0; i < SIDE; i++) \
        if (!(i & stage)) { \
            vec a = line[i], b = line[i + stage]; \
            line[i] = __builtin_shuffle(a, b, (ivec)first), line[i + stage] = __builtin_shuffle(a, b, (ivec)second); \
        }
static inline void turn(vec line[SIDE]) {
#pragma GCC unroll 16
    SWAPPED(8, ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
            ((ivec){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
#pragma GCC unroll 16
    SWAPPED(4, ((ivec){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
            ((ivec){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
#pragma GCC unroll 16
    SWAPPED(2, ((ivec){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
            ((ivec){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
#pragma GCC unroll 16
    SWAPPED(1, ((ivec){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
            ((ivec){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
}
#define PER_LINE 1  // vectors of a line
#else
#define PER_LINE (SIDE / LANES)
static inline void turn(vec* lines) {
    uint32_t* word = (uint32_t*)lines;
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < i; j++) {
            uint32_t before = word[i * SIDE + j];
            word[i * SIDE + j] = word[j * SIDE + i], word[j * SIDE + i] = before;
        }
}
#endif
