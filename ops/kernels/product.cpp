// Matrix products with casts, transposes, bias, activation and addend in one pass over the result.
#include <type_traits>

#include "gemm.h"

namespace ortgraph {
namespace {

using gemm::Block;
using gemm::Cut;
using gemm::Dense;
using gemm::Rounding;

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kSilu, kTanh };

Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "tanh") return Activation::kTanh;
  refuse("activation must be 'none', 'gelu', 'gelu_tanh', 'relu', 'silu' or 'tanh'");
}

V tanh(V x) {
  const V size = magnitude(x), e = exp(-2.0f * size), large = (1.0f - e) / (1.0f + e), s = x * x;
  // Series near 0, where the quotient cancels.
  const V small = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
  return size < 0.25f ? small : x < 0.0f ? -large : large;
}

V activate(V x, Activation activation) {
  switch (activation) {
    case Activation::kGelu: return x * normal(x).cdf;
    case Activation::kGeluTanh: return x * sigmoid(x * (1.59576912f + 0.0713548163f * (x * x)));  // 2 sqrt(2 / pi)
    case Activation::kRelu: return larger(V{}, x);
    case Activation::kSilu: return x * sigmoid(x);
    case Activation::kTanh: return tanh(x);
    case Activation::kNone: break;
  }
  return x;
}

// Y = cast(activation(Z) + Addend), Z = alpha * sums + Bias; element (m, n) of each at m * columns + n.
struct Finish {
  Output y, z;
  const void* addend;
  const float* bias;  // with room for whole vectors behind it
  float alpha;
  Activation activation;
  ElementType type;
  std::int64_t columns, start_at = 0;

  // Sums start from the bias, or from a float32 addend where nothing comes between.
  bool from_bias() const { return bias && alpha == 1.0f; }
  bool from_addend() const {
    return addend && !bias && !z && type == kFloat && alpha == 1.0f && activation == Activation::kNone;
  }
  gemm::Start start(std::int64_t m, std::int64_t n, std::int64_t nn) const {
    if (from_bias()) return {bias + n, 0};
    if (!from_addend() || nn % kLanes != 0) return {};
    return {static_cast<const float*>(addend) + start_at + m * columns + n, columns};
  }

  gemm::Place place(std::int64_t m, std::int64_t n, std::int64_t nn) const {
    const bool more = z || (addend && !from_addend()) || alpha != 1.0f || activation != Activation::kNone;
    if (!y || more || nn % kLanes != 0) return {};
    const std::int64_t at = start_at + m * columns + n;
    if (type == kFloat) return {static_cast<float*>(y.raw) + at, columns, false};
    if (type == kBfloat16) return {static_cast<Bf16*>(y.raw) + at, columns, true};
    return {};
  }

  void prepare(std::int64_t m, int rows, std::int64_t n, std::int64_t nn) const {
    if (!addend) return;
    const std::int64_t item = type == kFloat ? 4 : 2;
    for (int r = 0; r < rows; ++r) {
      const char* row = static_cast<const char*>(addend) + (start_at + (m + r) * columns + n) * item;
      for (std::int64_t at = 0; at < nn * item; at += 64) __builtin_prefetch(row + at);
    }
  }

  void finish(std::int64_t m, int rows, std::int64_t n, std::int64_t nn, const float* sums, std::int64_t width) const {
    switch (type) {
      case kBfloat16: return finish_as<Bf16>(m, rows, n, nn, sums, width);
      case kHalf: return finish_as<Half>(m, rows, n, nn, sums, width);
      default: return finish_as<float>(m, rows, n, nn, sums, width);
    }
  }

 private:
  template <class T>
  static void put(T* p, V x, Full span) {
    if constexpr (std::is_same_v<T, Half>) {
      store(p, x, span);
    } else {
      gemm::store_rounded(p, x);
    }
  }
  template <class T>
  static void put(T* p, V x, Part span) {
    store(p, x, span);
  }
  template <class T>
  void finish_as(std::int64_t m, int rows, std::int64_t n, std::int64_t nn, const float* sums, std::int64_t width) const {
    for (int r = 0; r < rows; ++r) {
      const std::int64_t at = start_at + (m + r) * columns + n;
      vectors(nn, [&](std::int64_t i, auto span) {
        V x = load(sums + r * width + i, span) * alpha;
        if (bias && !from_bias()) x += load(bias + n + i, span);
        if (z) put(static_cast<T*>(z.raw) + at + i, x, span);
        x = activate(x, activation);
        if (addend) x += load(static_cast<const T*>(addend) + at + i, span);
        if (y) put(static_cast<T*>(y.raw) + at + i, x, span);
      });
    }
  }
};

// The batch of a product: how far apart the operands of one product and the next are, in products.
struct Batch {
  std::int64_t count = 1;
  std::size_t rank = 0;
  std::int64_t dims[kMaxRank], a[kMaxRank], b[kMaxRank];

  void offsets(std::int64_t index, std::int64_t* a_at, std::int64_t* b_at) const {
    *a_at = *b_at = 0;
    for (std::size_t i = rank; i-- > 0; index /= dims[i]) {
      *a_at += index % dims[i] * a[i];
      *b_at += index % dims[i] * b[i];
    }
  }
};

struct Sizes {
  std::int64_t m, n, k;
  Batch batch;
  Shape shape;  // of the result
};

std::int64_t from_end(const Shape& shape, std::size_t i) { return i < shape.rank ? shape.dim[shape.rank - 1 - i] : 1; }

Sizes sizes_of(const Shape& a, const Shape& b, bool trans_a, bool trans_b) {
  expect(a.rank >= 2 && b.rank >= 2, "operands must have two dimensions at least");
  Sizes s;
  s.m = from_end(a, trans_a ? 0 : 1), s.k = from_end(a, trans_a ? 1 : 0), s.n = from_end(b, trans_b ? 1 : 0);
  expect(from_end(b, trans_b ? 0 : 1) == s.k, "the inner dimensions differ");
  s.shape.rank = std::max(a.rank, b.rank);
  const std::size_t rank = s.shape.rank - 2;
  s.batch.rank = rank;
  std::int64_t a_step = 1, b_step = 1;
  for (std::size_t i = rank; i-- > 0;) {
    const std::int64_t x = from_end(a, rank + 1 - i), y = from_end(b, rank + 1 - i);
    expect(x == y || x == 1 || y == 1, "batch dimensions do not broadcast");
    const std::int64_t both = x == 1 ? y : x;
    s.shape.dim[i] = s.batch.dims[i] = both;
    s.batch.a[i] = x == 1 ? 0 : a_step;
    s.batch.b[i] = y == 1 ? 0 : b_step;
    a_step *= x, b_step *= y;
    s.batch.count *= both;
  }
  s.shape.dim[rank] = s.m;
  s.shape.dim[rank + 1] = s.n;
  if (b_step == 1 && !trans_a && s.batch.count == a_step) {  // one tall product
    s.m *= s.batch.count;
    s.batch = Batch{};
  }
  return s;
}

// (A [..., M, K], B [..., K, N], Bias? [N], Addend?) -> (Y, Z?)
class Product final : public Kernel {
 public:
  explicit Product(const Attributes& a)
      : trans_a_(a.integer("transA", 0) != 0),
        trans_b_(a.integer("transB", 0) != 0),
        alpha_(static_cast<float>(a.decimal("alpha", 1.0))),
        activation_(activation_of(a.text("activation", "none"))) {
    const std::string precision = a.text("precision", "fp32");
    expect(precision == "fp32" || precision == "bf16" || precision == "fp16", "precision must be fp32, bf16 or fp16");
    rounding_ = precision == "bf16" ? Rounding::kBf16 : precision == "fp16" ? Rounding::kHalf : Rounding::kNone;
  }

  void compute(const Context& context) const override {
    const Tensor a = context.input(0), b = context.input(1);
    const Sizes sizes = sizes_of(a.shape, b.shape, trans_a_, trans_b_);
    switch (a.type) {
      case kBfloat16: return with_a<Bf16>(context, sizes, a, b);
      case kHalf: return with_a<Half>(context, sizes, a, b);
      default: return with_a<float>(context, sizes, a, b);
    }
  }

 private:
  template <class TA>
  void with_a(const Context& context, const Sizes& sizes, const Tensor& a, const Tensor& b) const {
    switch (b.type) {
      case kBfloat16: return with_b<TA, Bf16>(context, sizes, a, b);
      case kHalf: return with_b<TA, Half>(context, sizes, a, b);
      default: return with_b<TA, float>(context, sizes, a, b);
    }
  }

  template <class TA, class TB>
  void with_b(const Context& context, const Sizes& sizes, const Tensor& a, const Tensor& b) const {
    const Output y = context.typed_output(0, sizes.shape), z = context.typed_output(1, sizes.shape);
    const Tensor bias = context.input(2), addend = context.input(3);
    expect(!bias || (bias.shape.rank == 1 && bias.shape.dim[0] == sizes.n), "Bias must be [N]");
    expect(!addend || addend.shape == sizes.shape, "Addend must have the shape of the result");
    const std::int64_t wide = (sizes.n + kLanes - 1) / kLanes * kLanes;  // tiles read whole vectors of the bias
    const bool copied = bias && wide > sizes.n;
    const Scratch<float> row(copied ? static_cast<std::size_t>(wide) : 0);
    if (copied) std::copy_n(bias.floats(), sizes.n, row.data());
    const Finish finish{y, z, addend.raw, copied ? row.data() : bias.floats(), alpha_, activation_,
                        y ? y.type : z.type, sizes.n};
    constexpr bool kMayPair = !std::is_same_v<TA, Half> && !std::is_same_v<TB, Half>;
    if constexpr (kMayPair) {
      if (rounding_ == Rounding::kBf16) {
        return multiply<gemm::Pair>(context, sizes, static_cast<const TA*>(a.raw), static_cast<const TB*>(b.raw), finish);
      }
    }
    multiply<gemm::Single>(context, sizes, static_cast<const TA*>(a.raw), static_cast<const TB*>(b.raw), finish);
  }

  template <class Arithmetic, class TA, class TB>
  void multiply(const Context& context, const Sizes& s, const TA* a, const TB* b, const Finish& all) const {
    if (s.m == 0 || s.n == 0 || s.batch.count == 0) return;
    const Dense<Arithmetic, TA> left{a, trans_a_ ? s.m : s.k, !trans_a_, rounding_};
    const Dense<Arithmetic, TB> right{b, trans_b_ ? s.k : s.n, trans_b_, rounding_};
    const Cut cut = gemm::cut(s.m, s.n, s.k, s.batch.count, !left.rows_in_place(s.k), gemm::depth<Arithmetic>());
    const std::int64_t pieces = cut.pieces() * s.batch.count;
    const std::int64_t together = cut.together(s.k, s.batch.count);
    context.parallel(static_cast<std::size_t>((pieces + together - 1) / together), [&](std::size_t part) {
      const std::int64_t begin = static_cast<std::int64_t>(part) * together, end = std::min(pieces, begin + together);
      for (std::int64_t p = begin; p < end; ++p) {
        const std::int64_t item = p / cut.pieces();
        std::int64_t a_at, b_at;
        s.batch.offsets(item, &a_at, &b_at);
        Dense<Arithmetic, TA> one_a = left;
        Dense<Arithmetic, TB> one_b = right;
        one_a.data += a_at * s.m * s.k;
        one_b.data += b_at * s.k * s.n;
        Finish one = all;
        one.start_at = item * s.m * s.n;
        gemm::piece<Arithmetic>(one_a, one_b, one, cut.block(p % cut.pieces(), s.m, s.n), s.k);
      }
    });
  }

  bool trans_a_, trans_b_;
  float alpha_;
  Activation activation_;
  Rounding rounding_ = Rounding::kNone;
};

}  // namespace

void add_product(Definitions& to) {
  add_variants(to, "Product", {low(0), low(1), kF_, low(2, kOptional)}, {low(2, kOptional), low(2, kOptional)},
               make<Product>, true);
}

}  // namespace ortgraph
