// silu, gelu and its tanh form on 16 floats, to about two units in the last place of float32 but for exp's tails.
#pragma once

#include <immintrin.h>

namespace moe_ladder {

enum class Activation : int { SILU = 0, GELU = 1, GELU_TANH = 2 };

// exp by 2^n * exp(r), |r| <= ln(2) / 2, Taylor to the seventh power; overflow gives inf, NaN stays NaN.
inline __m512 exp_ps(__m512 x) {
  // In this order of arguments a NaN passes through min and max.
  const __m512 c = _mm512_min_ps(_mm512_set1_ps(130.0f), _mm512_max_ps(_mm512_set1_ps(-150.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  __m512 p = _mm512_set1_ps(1.0f / 5040);
#pragma GCC unroll 7
  for (float f : factors) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(f));
  return _mm512_scalef_ps(p, n);
}

// x / (1 + exp(-z))
inline __m512 times_sigmoid(__m512 x, __m512 z) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), z))));
}

// erfc(z) for z >= 0 to 1.2e-7 of its value, also where it is tiny: Press et al., Numerical Recipes in C, 6.2 (erfcc).
inline __m512 erfc_ps(__m512 z) {
  const __m512 t = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_fmadd_ps(_mm512_set1_ps(0.5f), z, _mm512_set1_ps(1.0f)));
  const float factors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                           0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  __m512 p = _mm512_set1_ps(0.17087277f);
#pragma GCC unroll 9
  for (float f : factors) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(f));
  return _mm512_mul_ps(t, exp_ps(_mm512_fnmadd_ps(z, z, p)));
}

inline __m512 gelu(__m512 x) {
  const __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(0.70710678f));
  const __m512 tail = erfc_ps(_mm512_abs_ps(z));  // of the negative side: 1 + erf(z) = erfc(-z)
  const __mmask16 is_positive = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 factor = _mm512_mask_sub_ps(tail, is_positive, _mm512_set1_ps(2.0f), tail);
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), factor);
}

// (1 + tanh(u)) / 2 = sigmoid(2 u)
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  return times_sigmoid(x, _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(2.0f * 0.79788456f)));
}

inline __m512 activate(Activation activation, __m512 x) {
  switch (activation) {
    case Activation::SILU: return times_sigmoid(x, x);
    case Activation::GELU: return gelu(x);
    default: return gelu_tanh(x);
  }
}

}  // namespace moe_ladder
