// Loops over accumulators are unrolled by templates: GCC keeps arrays that a loop indexes in memory. Included once for each
// instruction set, inside its namespace: a function that is inlined must not have been compiled for less.
template <int I, int END, class F> ALWAYS_INLINE void each(F &&body) {
    if constexpr (I < END) {
        body(std::integral_constant<int, I>{});
        each<I + 1, END>(body);
    }
}
