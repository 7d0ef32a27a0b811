// A few rows through a Llama on a CPU: what specdec/native.py compiles and calls.
//
// With few rows a step takes as long as reading the weights once, so that everything here is about reading them once, in the few
// bytes that they are stored in, with all threads, and about stopping for nothing in between: one parallel region holds all blocks.
//
// A row's sums run in one order, however many rows are fed beside it: tile<1> and tile<4> add the same numbers in the same
// sequence. Hence one pass over n tokens gives bit for bit what n passes over one token give.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;   // floats in a register
constexpr int OUTPUTS = 4;  // outputs of a tile: so many rows of weights are read side by side
constexpr int TOKENS = 6;   // rows of activations of a tile, at most; sums and operands of a tile fill the registers
#else
constexpr int LANES = 8;
constexpr int OUTPUTS = 2;
constexpr int TOKENS = 4;
#endif
constexpr int BLOCK = 32;  // columns that a tile takes at a time; every matrix has a multiple of it
constexpr int PARTS = BLOCK / LANES;
constexpr int LINE = 64;              // bytes that memory gives at a time
constexpr int WEIGHTS_AHEAD = 8192;   // bytes between what is read and what is asked for: memory answers late, and the processor,
constexpr int SCALES_AHEAD = 2048;    // left to itself, does not ask early enough

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// LANES bytes as integers. The compiler's own conversion of vectors takes them apart.
#if defined(__AVX512F__)
inline Ints widened(const uint8_t* from) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from)); }
inline Ints widened(const int8_t* from) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from)); }
inline Ints widened(const uint16_t* from) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(from)); }
#elif defined(__AVX2__)
inline Ints widened(const uint8_t* from) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline Ints widened(const int8_t* from) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline Ints widened(const uint16_t* from) { return (Ints)_mm256_cvtepu16_epi32(load<__m128i>(from)); }
#else
template <class Integer>
inline Ints widened(const Integer* from) {
  Ints integers;
  for (int i = 0; i < LANES; i++) integers[i] = from[i];
  return integers;
}
#endif

inline Floats as_floats(Ints bits) { return load<Floats>(&bits); }

inline float sum(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float parts[LANES];
  std::memcpy(parts, &v, sizeof v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
#endif
}

}  // namespace

// What native.py fills in; the order of the members is that of its ctypes.Structures.

enum Format : int32_t { FLOAT32, BFLOAT16, INT8, INT4 };

struct Matrix {       // y = x Wᵀ + b
  int32_t format;     // of the weights
  int32_t outputs;
  int32_t columns;    // inputs, a multiple of BLOCK
  int32_t group;      // INT4: columns that share a scale and an offset, a multiple of BLOCK
  const void* weights;  // (outputs, columns); INT4: 16 bytes a block, its first half in the lower four bits, its second above
  const void* scales;   // INT8: float32, one an output. INT4: (outputs, columns / group) pairs of bfloat16, scale and offset
  const float* bias;    // (outputs,) or null
};

struct Layer {
  const float *attention_norm, *mlp_norm;  // (hidden,)
  Matrix q, k, v, o, gate, up, down;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, width, inner;
  float eps;
  const Layer* layer;
  const float* norm;  // (hidden,)
  Matrix head;
};

namespace {

// Weights, widened to float32 a block at a time

struct Float32 {
  const float* at;
  static constexpr int BITS = 32;
  Float32() = default;
  inline float scale() const { return 1.f; }
  Float32(const Matrix& m, int output) : at((const float*)m.weights + (int64_t)output * m.columns) {}
  inline void widen(int block, Floats* w) const {
    for (int part = 0; part < PARTS; part++) w[part] = load<Floats>(at + block * BLOCK + part * LANES);
  }
};

struct BFloat16 {
  const uint16_t* at;
  static constexpr int BITS = 16;
  BFloat16() = default;
  inline float scale() const { return 1.f; }
  BFloat16(const Matrix& m, int output) : at((const uint16_t*)m.weights + (int64_t)output * m.columns) {}
  inline void widen(int block, Floats* w) const {
    for (int part = 0; part < PARTS; part++)
      w[part] = as_floats(widened(at + block * BLOCK + part * LANES) << 16);
  }
};

struct Int8 {
  const int8_t* at;
  float of_row;
  static constexpr int BITS = 8;
  Int8() = default;
  inline float scale() const { return of_row; }
  Int8(const Matrix& m, int output)
      : at((const int8_t*)m.weights + (int64_t)output * m.columns), of_row(((const float*)m.scales)[output]) {}
  inline void widen(int block, Floats* w) const {
    for (int part = 0; part < PARTS; part++) {
      Ints levels = widened(at + block * BLOCK + part * LANES);
      w[part] = __builtin_convertvector(levels, Floats);
    }
  }
};

#ifdef __AVX512F__
constexpr Floats LEVELS = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
#endif

struct Int4 {  // (level - 8) * scale + offset
  const uint8_t* at;
  const int32_t* pairs;
  int blocks;  // that share a pair
  static constexpr int BITS = 4;
  Int4() = default;
  inline float scale() const { return 1.f; }
  Int4(const Matrix& m, int output)
      : at((const uint8_t*)m.weights + (int64_t)output * (m.columns / 2)),
        pairs((const int32_t*)m.scales + (int64_t)output * (m.columns / m.group)),
        blocks(m.group / BLOCK) {}
  inline void widen(int block, Floats* w) const {
    Ints pair = Ints{} + pairs[blocks == 1 ? block : block / blocks];
    Floats scale = as_floats(pair << 16), offset = as_floats(pair & (int32_t)0xffff0000);
#ifdef __AVX512F__
    // A register holds what each of the 16 levels stands for, and two instructions look 32 of them up.
    __m512i both = _mm512_cvtepu8_epi32(load<__m128i>(at + block * (BLOCK / 2)));
    __m512 values = (__m512)(LEVELS * scale + offset);
    w[0] = (Floats)_mm512_permutexvar_ps(both, values);  // by the lowest four bits
    w[1] = (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values);
#else
    for (int part = 0; part < PARTS / 2; part++) {
      Ints both = widened(at + block * (BLOCK / 2) + part * LANES);
      w[part] = __builtin_convertvector((both & 15) - 8, Floats) * scale + offset;
      w[part + PARTS / 2] = __builtin_convertvector((both >> 4) - 8, Floats) * scale + offset;
    }
#endif
  }
};

// Products

inline void ask_for(const void* address) { __builtin_prefetch(address, 0, 2); }  // into the second cache; the first is small

template <class Weights, int OUT, int IN>
inline void tile(const Matrix& m, int output, const float* x, float* y, int y_width, bool add) {
  Weights rows[OUT];
  for (int o = 0; o < OUT; o++) rows[o] = Weights(m, output + o);
  constexpr int LINES = (OUT * BLOCK * Weights::BITS / 8 + LINE - 1) / LINE;  // that a tile reads in a block
  const int32_t* scales = Weights::BITS == 4 ? (const int32_t*)m.scales + (int64_t)output * (m.columns / m.group) : nullptr;
  Floats sums[OUT][IN] = {};
  for (int block = 0; block < m.columns / BLOCK; block++) {
    Floats w[OUT][PARTS];
    for (int o = 0; o < OUT; o++) rows[o].widen(block, w[o]);
    for (int line = 0; line < LINES; line++) ask_for((const char*)rows[0].at + WEIGHTS_AHEAD + (block * LINES + line) * LINE);
    if (Weights::BITS == 4) ask_for((const char*)scales + SCALES_AHEAD + block * OUT * 4);
    for (int part = 0; part < PARTS; part++)
      for (int i = 0; i < IN; i++) {
        Floats of_x = load<Floats>(x + (int64_t)i * m.columns + block * BLOCK + part * LANES);
        for (int o = 0; o < OUT; o++) sums[o][i] += w[o][part] * of_x;
      }
  }
  for (int i = 0; i < IN; i++)
    for (int o = 0; o < OUT; o++) {
      float value = sum(sums[o][i]) * rows[o].scale() + (m.bias ? m.bias[output + o] : 0.f);
      float* to = y + (int64_t)i * y_width + output + o;
      *to = add ? *to + value : value;
    }
}

template <class Weights, int OUT, int IN = TOKENS>
inline void chosen(int in, const Matrix& m, int output, const float* x, float* y, int y_width, bool add) {
  if constexpr (IN > 1)
    if (in < IN) return chosen<Weights, OUT, IN - 1>(in, m, output, x, y, y_width, add);
  tile<Weights, OUT, IN>(m, output, x, y, y_width, add);
}

template <class Weights, int OUT>
inline void outputs(const Matrix& m, int output, const float* x, int n, float* y, int y_width, bool add) {
  for (int tiles = (n + TOKENS - 1) / TOKENS; tiles > 0; tiles--) {
    int in = (n + tiles - 1) / tiles;  // tiles of one size: the smaller one is, the less it makes of the weights
    chosen<Weights, OUT>(in, m, output, x, y, y_width, add);
    x += (int64_t)in * m.columns, y += (int64_t)in * y_width, n -= in;
  }
}

template <class Weights>
void product(const Matrix& m, const float* x, int n, float* y, bool add) {
  int tiles = (m.outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(static) nowait
  for (int t = 0; t < tiles; t++) {
    int output = t * OUTPUTS;
    if (output + OUTPUTS <= m.outputs) outputs<Weights, OUTPUTS>(m, output, x, n, y, m.outputs, add);
    else
      for (; output < m.outputs; output++) outputs<Weights, 1>(m, output, x, n, y, m.outputs, add);
  }
}

// y (n, outputs) = or += x (n, columns) Wᵀ + b, the outputs shared among the threads of the region; no barrier.
void multiply(const Matrix& m, const float* x, int n, float* y, bool add = false) {
  switch (m.format) {
    case FLOAT32: return product<Float32>(m, x, n, y, add);
    case BFLOAT16: return product<BFloat16>(m, x, n, y, add);
    case INT8: return product<Int8>(m, x, n, y, add);
    case INT4: return product<Int4>(m, x, n, y, add);
  }
}

inline float dot(const float* a, const float* b, int width) {
  Floats total = {};
  int i = 0;
  for (; i + LANES <= width; i += LANES) total += load<Floats>(a + i) * load<Floats>(b + i);
  float rest = sum(total);
  for (; i < width; i++) rest += a[i] * b[i];
  return rest;
}

// y = x / rms(x) * weight, for each of n rows
void normalise(const float* x, const float* weight, int n, int hidden, float eps, float* y) {
  for (int t = 0; t < n; t++, x += hidden, y += hidden) {
    float factor = 1.f / std::sqrt(dot(x, x, hidden) / hidden + eps);
    for (int i = 0; i < hidden; i++) y[i] = x[i] * factor * weight[i];
  }
}

// Turn each entry i of the first half of a head and the one width / 2 behind it by an angle; the sines of the first half negative.
void rotate(const float* head, const float* cos, const float* sin, int width, float* to) {
  int half = width / 2;
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    to[i] = first * cos[i] + second * sin[i];
    to[i + half] = second * cos[i + half] + first * sin[i + half];
  }
}

// What one query sees of the first `seen` keys and values, (seen, width) each.
void attend(const float* query, const float* keys, const float* values, int seen, int width, float* scores, float* y) {
  float scale = 1.f / std::sqrt((float)width), top = -INFINITY, total = 0.f;
  for (int j = 0; j < seen; j++) top = std::max(top, scores[j] = scale * dot(query, keys + (int64_t)j * width, width));
  for (int j = 0; j < seen; j++) total += scores[j] = std::exp(scores[j] - top);
  std::fill(y, y + width, 0.f);
  for (int j = 0; j < seen; j++) {
    float weight = scores[j] / total;
    const float* value = values + (int64_t)j * width;
    for (int i = 0; i < width; i++) y[i] += weight * value[i];
  }
}

}  // namespace

extern "C" {

// x (n, hidden), the embeddings of n tokens that stand behind `start` others, becomes the residual stream behind the last block.
// cos, sin: (n, width). keys, values: of each layer (kv_heads, capacity, width); n entries of each are written.
void specdec_hidden(const Model* model, float* x, int32_t n, int32_t start, const float* cos, const float* sin, float** keys,
                    float** values, int32_t capacity, int32_t threads) {
  const Model& m = *model;
  const int width = m.width, of_q = m.heads * width, of_kv = m.kv_heads * width, group = m.heads / m.kv_heads;
  std::vector<float> q((size_t)n * of_q), k((size_t)n * of_kv), v((size_t)n * of_kv), seen((size_t)n * of_q);
  std::vector<float> gate((size_t)n * m.inner), up((size_t)n * m.inner);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> normed((size_t)n * m.hidden), scores(start + n), turned(width);
    for (int l = 0; l < m.layers; l++) {
      const Layer& layer = m.layer[l];
      normalise(x, layer.attention_norm, n, m.hidden, m.eps, normed.data());  // each thread for itself: dearer to wait for
      multiply(layer.q, normed.data(), n, q.data());
      multiply(layer.k, normed.data(), n, k.data());
      multiply(layer.v, normed.data(), n, v.data());
#pragma omp barrier
#pragma omp for schedule(static)
      for (int i = 0; i < n * m.kv_heads; i++) {
        int t = i / m.kv_heads, h = i % m.kv_heads;
        int64_t from = (int64_t)t * of_kv + h * width, to = ((int64_t)h * capacity + start + t) * width;
        rotate(&k[from], cos + (int64_t)t * width, sin + (int64_t)t * width, width, keys[l] + to);
        std::copy_n(&v[from], width, values[l] + to);
      }
#pragma omp for schedule(static)
      for (int i = 0; i < n * m.heads; i++) {
        int t = i / m.heads, h = i % m.heads;
        int64_t at = (int64_t)t * of_q + h * width, past = (int64_t)(h / group) * capacity * width;
        rotate(&q[at], cos + (int64_t)t * width, sin + (int64_t)t * width, width, turned.data());
        attend(turned.data(), keys[l] + past, values[l] + past, start + t + 1, width, scores.data(), &seen[at]);
      }
      multiply(layer.o, seen.data(), n, x, true);
#pragma omp barrier
      normalise(x, layer.mlp_norm, n, m.hidden, m.eps, normed.data());
      multiply(layer.gate, normed.data(), n, gate.data());
      multiply(layer.up, normed.data(), n, up.data());
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < (int64_t)n * m.inner; i++) gate[i] = gate[i] / (1.f + std::exp(-gate[i])) * up[i];  // SiLU
      multiply(layer.down, gate.data(), n, x, true);
#pragma omp barrier
    }
  }
}

// Logits (n, outputs of the head) of the residual stream x (n, hidden).
void specdec_logits(const Model* model, const float* x, int32_t n, float* logits, int32_t threads) {
  const Model& m = *model;
  std::vector<float> normed((size_t)n * m.hidden);
  normalise(x, m.norm, n, m.hidden, m.eps, normed.data());
#pragma omp parallel num_threads(threads)
  multiply(m.head, normed.data(), n, logits);
}
}
