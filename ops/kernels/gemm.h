// Blocked matrix products of packed panels, for every kernel that multiplies.
//
// Y[m, n] = sum over k of A(m, k) B(k, n), cut into pieces of rows and columns. A piece packs 64 columns of B at a time
// (casting, transposing or gathering on the way), reads rows of A where they lie or packs them too, and hands finished
// tiles of sums to an epilogue. Blocks over k have a fixed length and are added in order: an element's bits follow from
// its row, its column and k, whatever pieces the result is cut into, and so are the same at any number of threads.
//
// What `piece` is given:
//   A: std::int64_t space_words(mn, kn)                                       that `rows` packs into
//      Rows rows(m0, mn, k0, kn, Word* space)                                 a block's rows
//   B: Columns panel(n0, nn, k0, kn, width, once, Word* space)                `once`: few rows read it
//   Epilogue: Start start(m, n, nn)        what sums of that tile start from
//             Place place(m, n, nn)        where a tile may be left as the result, or nothing
//             void prepare(m, rows, n, nn) ahead of the others: what they read is fetched
//             void finish(m, rows, n, nn, const float* sums, std::int64_t width)        else
// `Dense` (gemm_pack.h) is both kinds of operand.
#pragma once

#include <thread>

#include "gemm_pack.h"
#include "kernel.h"

namespace ortgraph {
namespace gemm {

constexpr std::int64_t kBlockWords = 512;                           // steps of a block over k
constexpr std::int64_t kMaxRows = 288;                              // of a piece that has whole blocks over k
constexpr std::int64_t kMostRows = 4 * kMaxRows;                    // of a piece with shorter ones: as many words
constexpr std::int64_t kMaxSums = 72 * 1024;                        // floats: of a piece with several blocks over k
constexpr std::int64_t kFewRows = 48;

constexpr double kMultiplyAdds = 250;  // a nanosecond
constexpr double kPackNs = 0.08;       // an element
constexpr double kPieceNs = 500;
constexpr double kPartNs = 8000;       // of work that one hand-over is worth
constexpr std::int64_t kMaxParts = 32;

// Threads that a product is cut for: as many as the processor has, eight at most. The session may use more or fewer.
constexpr std::int64_t kMostThreads = 8;
inline std::int64_t processor_threads() {
  static const std::int64_t count =
      std::min<std::int64_t>(std::max<std::int64_t>(std::thread::hardware_concurrency(), 1), kMostThreads);
  return count;
}

// Steps of a block over k, in elements.
template <class Arithmetic>
constexpr std::int64_t depth() {
  return kBlockWords * Arithmetic::kDepth;
}

struct Start {
  const float* at = nullptr;  // null for zeros; `nn` rounded up to whole vectors can be read
  std::int64_t width = 0;
};
struct Place {
  void* at = nullptr;
  std::int64_t width = 0;
  bool low = false;  // bfloat16, not float32
};

struct Block {
  std::int64_t m0, mn, n0, nn;
};

// Packing buffers of a thread. They grow to what its largest product so far wants and are kept: memory that is given
// back to the system comes back as page faults. ops/kernels/product_scratch.py states their sizes.
struct Space {
  Scratch<Word> a{0}, b{0};
  Scratch<float> sums{0};
  std::size_t sizes[3] = {};

  template <class T>
  T* at_least(Scratch<T>& buffer, std::size_t& has, std::int64_t count) {
    if (has < static_cast<std::size_t>(count)) {
      has = static_cast<std::size_t>(count);
      buffer = Scratch<T>(has);
    }
    return buffer.data();
  }
  static Space& own() {
    thread_local Space space;
    return space;
  }
};

template <class Arithmetic, class A, class B, class Epilogue>
void piece(const A& a, const B& b, const Epilogue& epilogue, const Block& block, std::int64_t k) {
  constexpr std::int64_t kDepth = Arithmetic::kDepth, kDeep = depth<Arithmetic>();
  Space& space = Space::own();
  const std::int64_t steps = (std::min(kDeep, k) + kDepth - 1) / kDepth, wide = (block.nn + kLanes - 1) / kLanes * kLanes;
  Word* const a_space = space.at_least(space.a, space.sizes[0], a.space_words(block.mn, std::min(kDeep, k)));
  Word* const b_space = space.at_least(space.b, space.sizes[1], kColumns * steps);
  float* const all_sums = space.at_least(space.sums, space.sizes[2], k > kDeep ? block.mn * wide : 0);
  alignas(64) float tile[kRows * kColumns];
  for (std::int64_t k0 = 0; k0 == 0 || k0 < k; k0 += kDeep) {
    const std::int64_t kn = std::min(kDeep, k - k0);
    const bool last = k0 + kn == k;
    const Rows rows = a.rows(block.m0, block.mn, k0, kn, a_space);
    for (std::int64_t n = 0; n < block.nn; n += kColumns) {
      const std::int64_t nn = std::min<std::int64_t>(kColumns, block.nn - n);
      const int vectors = static_cast<int>((nn + kLanes - 1) / kLanes);
      const Columns columns = b.panel(block.n0 + n, nn, k0, kn, vectors * kLanes, block.mn <= kFewRows, b_space);
      for (std::int64_t m = 0; m < block.mn; m += kRows) {
        const int count = static_cast<int>(std::min<std::int64_t>(kRows, block.mn - m));
        const Place place = last ? epilogue.place(block.m0 + m, block.n0 + n, nn) : Place{};
        float* const sums = last && k0 == 0 ? tile : all_sums + m * wide + n;
        const std::int64_t width = last && k0 == 0 ? kColumns : wide;
        const Start start = k0 == 0 ? epilogue.start(block.m0 + m, block.n0 + n, nn) : Start{sums, width};
        Tile t{rows.row(m), rows.row_step, rows.step, columns.at, columns.step, (kn + kDepth - 1) / kDepth,
               start.at, start.width, sums, width};
        epilogue.prepare(block.m0 + m + kRows, static_cast<int>(std::min<std::int64_t>(kRows, block.mn - m - kRows)),
                         block.n0 + n, nn);
        if (place.at) t.to = place.at, t.width = place.width;
        (place.low ? tile_of<Arithmetic, Bf16>(count, vectors) : tile_of<Arithmetic, float>(count, vectors))(t);
        if (last && !place.at) epilogue.finish(block.m0 + m, count, block.n0 + n, nn, sums, width);
      }
    }
  }
}

// How a product is cut: `rows` x `columns` of a piece. Every piece packs its own operands, so that few large pieces are
// best: as many as threads have work from.
struct Cut {
  std::int64_t rows = 1, columns = 1, row_pieces = 1, column_pieces = 1;
  std::int64_t pieces() const { return row_pieces * column_pieces; }
  // Pieces that a thread takes at a time, so that a hand-over is worth it.
  std::int64_t together(std::int64_t k, std::int64_t batch) const {
    const double ns = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(k) / kMultiplyAdds;
    const std::int64_t few = std::max<std::int64_t>(pieces() * batch / kMaxParts, 1);
    return std::min<std::int64_t>(static_cast<std::int64_t>(kPartNs / (ns + 1)) + 1, few);
  }
  Block block(std::int64_t piece, std::int64_t m, std::int64_t n) const {
    const std::int64_t m0 = piece / column_pieces * rows, n0 = piece % column_pieces * columns;
    return {m0, std::min(rows, m - m0), n0, std::min(columns, n - n0)};
  }
};

inline Cut cut(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batch, bool pack_a, std::int64_t deep,
               std::int64_t threads = processor_threads()) {
  constexpr std::int64_t counts[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128};
  const std::int64_t panels = (n + kColumns - 1) / kColumns;
  Cut best;
  double best_ns = -1;
  for (std::int64_t by_rows : counts) {
    if (by_rows > 1 && by_rows > m / kRows) break;
    const std::int64_t rows = std::max<std::int64_t>((m + by_rows - 1) / by_rows, 1);
    if (rows > kMostRows || rows * std::min(k, deep) > kMaxRows * deep) continue;
    for (std::int64_t by_columns : counts) {
      if (by_columns > 1 && by_columns > panels) break;
      const std::int64_t columns = std::max<std::int64_t>((panels + by_columns - 1) / by_columns, 1) * kColumns;
      if (k > deep && rows * columns > kMaxSums) continue;
      Cut cut{rows, columns, (m + rows - 1) / rows, (n + columns - 1) / columns};
      const double depth = static_cast<double>(k), r = static_cast<double>(rows), c = static_cast<double>(columns);
      const double ns = kPieceNs + r * c * depth / kMultiplyAdds + depth * kPackNs * (c + (pack_a ? r : 0));
      const double total = ns * static_cast<double>((cut.pieces() * batch + threads - 1) / threads);
      if (best_ns < 0 || total < best_ns) best_ns = total, best = cut;
    }
  }
  if (best_ns < 0) {  // very tall or very wide: the smallest pieces that are allowed
    const std::int64_t rows = std::min(m, kMaxRows / 2);
    const std::int64_t columns = std::min((n + kColumns - 1) / kColumns * kColumns, kMaxSums / rows / kColumns * kColumns);
    best = {rows, columns, (m + rows - 1) / rows, (n + columns - 1) / columns};
  }
  return best;
}

}  // namespace gemm
}  // namespace ortgraph
