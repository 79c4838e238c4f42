// Transpose: any permutation, on all threads.
#include <cstring>

#include "kernel.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kTile = 16;  // a tile of 16 x 16 floats is read and written in whole cache lines

// One dimension of the result: its size, and how far a step along it goes in X and in Y.
struct Axis {
  std::int64_t size, in, out;
};

// (X) -> Y with Y's dimension i being X's dimension perm[i]; without perm the order is reversed.
class Transpose final : public Kernel {
 public:
  explicit Transpose(const Attributes& a) : perm_(a.shape("perm")) {}

  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    const Shape& shape = x.shape;
    const std::size_t rank = shape.rank;
    const Shape perm = order(rank);
    std::int64_t stride[kMaxRank], step = 1;
    for (std::size_t i = rank; i-- > 0; step *= shape.dim[i]) stride[i] = step;
    Shape result = shape;
    for (std::size_t i = 0; i < rank; ++i) result.dim[i] = shape.dim[static_cast<std::size_t>(perm.dim[i])];
    float* y = context.floats(0, result);
    if (shape.count() == 0) return;
    std::vector<Axis> axes;
    step = 1;
    for (std::size_t i = rank; i-- > 0; step *= result.dim[i]) {
      axes.insert(axes.begin(), Axis{result.dim[i], stride[perm.dim[i]], step});
    }
    merge(axes);
    move(context, axes, x.floats(), y);
  }

 private:
  Shape order(std::size_t rank) const {
    Shape perm = perm_;
    if (perm.rank == 0) {
      for (std::size_t i = 0; i < rank; ++i) perm.dim[perm.rank++] = static_cast<std::int64_t>(rank - 1 - i);
    }
    bool seen[kMaxRank] = {};
    expect(perm.rank == rank, "perm has another number of dimensions than X");
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int64_t p = perm.dim[i];
      expect(p >= 0 && p < static_cast<std::int64_t>(rank) && !seen[p], "perm is not a permutation");
      seen[p] = true;
    }
    return perm;
  }

  // Neighbours that are neighbours in X too become one dimension; dimensions of size 1 go.
  static void merge(std::vector<Axis>& axes) {
    std::vector<Axis> kept;
    for (const Axis& axis : axes) {
      if (axis.size == 1) continue;
      if (!kept.empty() && kept.back().in == axis.in * axis.size) {
        kept.back() = {kept.back().size * axis.size, axis.in, axis.out};
      } else {
        kept.push_back(axis);
      }
    }
    axes = kept;
  }

  static void move(const Context& context, std::vector<Axis>& axes, const float* x, float* y) {
    if (axes.empty() || axes.back().in != 1) axes.push_back({1, 1, 1});
    const Axis run = axes.back();  // contiguous on both sides
    axes.pop_back();
    if (run.size > 1 || axes.size() < 2) return copy(context, axes, run.size, x, y);
    // Tiles over the two dimensions that are contiguous in Y (the last) and in X.
    const Axis last = axes.back();
    axes.pop_back();
    const auto first = std::find_if(axes.begin(), axes.end(), [](const Axis& a) { return a.in == 1; });
    const Axis other = *first;
    axes.erase(first);
    tiles(context, axes, last, other, x, y);
  }

  // Where item `index` of the dimensions `axes` starts in X and in Y.
  static std::pair<std::int64_t, std::int64_t> place(const std::vector<Axis>& axes, std::int64_t index) {
    std::int64_t in = 0, out = 0;
    for (std::size_t i = axes.size(); i-- > 0;) {
      in += index % axes[i].size * axes[i].in;
      out += index % axes[i].size * axes[i].out;
      index /= axes[i].size;
    }
    return {in, out};
  }

  static std::int64_t count(const std::vector<Axis>& axes) {
    std::int64_t product = 1;
    for (const Axis& axis : axes) product *= axis.size;
    return product;
  }

  static void copy(const Context& context, const std::vector<Axis>& axes, std::int64_t run, const float* x, float* y) {
    context.rows(count(axes), run, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto [in, out] = place(axes, i);
        std::memcpy(y + out, x + in, static_cast<std::size_t>(run) * sizeof(float));
      }
    });
  }

  static void tiles(const Context& context, const std::vector<Axis>& axes, const Axis& last, const Axis& other,
                    const float* x, float* y) {
    const std::int64_t bands = (other.size + kTile - 1) / kTile;
    context.rows(count(axes) * bands, kTile * last.size, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto [in, out] = place(axes, i / bands);
        const std::int64_t from = i % bands * kTile, to = std::min(other.size, from + kTile);
        for (std::int64_t c = 0; c < last.size; c += kTile) {
          const std::int64_t stop = std::min(last.size, c + kTile);
          for (std::int64_t r = from; r < to; ++r) {
            for (std::int64_t k = c; k < stop; ++k) y[out + r * other.out + k] = x[in + r + k * last.in];
          }
        }
      }
    });
  }

  Shape perm_;
};

}  // namespace

void add_movement(Definitions& to) {
  static Definition transpose("Transpose", {kF}, {kF}, make<Transpose>);
  to.push_back(&transpose);
}

}  // namespace ortgraph
