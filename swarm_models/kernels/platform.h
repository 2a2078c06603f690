// Differences between processors and compilers: the possible instruction sets, and the attributes of functions.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define ARM 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#if defined(__GNUC__)
#define INLINE __attribute__((always_inline))
#define ALWAYS_INLINE INLINE static inline
#define NEVER_INLINE __attribute__((noinline))
#define PREFETCH_FAR(address) __builtin_prefetch(address, 0, 2)  // into the L2 cache: does not delay nearer reads
#define PREFETCH_NEAR(address) __builtin_prefetch(address, 0, 3)  // into the L1 cache
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define INLINE
#define ALWAYS_INLINE static inline
#define NEVER_INLINE
#define PREFETCH_FAR(address) (void)0
#define PREFETCH_NEAR(address) (void)0
#define EXPORT extern "C" __declspec(dllexport)
#endif
