// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/wgmma.h on the host.
#pragma once

#include "ptx/product.h"
#include "ptx/warpgroup.h"

namespace dualkv::ptx {

constexpr int kProductRows = 64, kProductDepth = 16;

// An operand in shared memory as its descriptor says: rows of 128 bytes whose chunks are permuted,
// in groups of 8. Calls store(element of M or N, element of K, value).
template <typename T, bool kIsMajor, class Store>
void read_operand(uint64_t descriptor, int size, Store store) {
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t begin = field(0), panel_bytes = field(16), group_bytes = field(32);
  if (descriptor >> 62 != 1) host_cuda::fail("a descriptor of rows that are not permuted by 128 bytes");
  // Chunks of 8 elements along the dimension that is contiguous.
  for (int i = 0; i < size; i += kIsMajor ? 8 : 1)
    for (int k = 0; k < kProductDepth; k += kIsMajor ? 1 : 8) {
      const uint32_t address = kIsMajor ? begin + i / 64 * panel_bytes + i % 64 * 2 + k % 8 * 128 + k / 8 * group_bytes
                                        : begin + i / 8 * group_bytes + i % 8 * 128 + k * 2;
      T values[8];
      host_cuda::shared_pointer(host_cuda::swizzled(address), 16, 16);
      std::memcpy(values, host_cuda::read_behind_fences(host_cuda::swizzled(address)), 16);
      for (int e = 0; e < 8; ++e) store(kIsMajor ? i + e : i, kIsMajor ? k : k + e, host_cuda::to_float(values[e]));
    }
}

template <int kN>
void multiply(const float (&a)[kProductRows][kProductDepth], const float (&b)[kProductDepth][kN],
              const OrderedProduct& product) {
  for (int row = 0; row < kProductRows; ++row) {
    const int thread = row / 16 * 32 + row % 8 * 4, half = row % 16 / 8;  // the first of four that hold the row
    double sums[kN];
    for (int column = 0; column < kN; ++column) {
      const float* d = product.d[thread + column % 8 / 2];
      sums[column] = product.accumulate ? d[column / 8 * 4 + half * 2 + column % 2] : 0.0;
    }
    for (int k = 0; k < kProductDepth; ++k)
      for (int column = 0; column < kN; ++column) sums[column] += static_cast<double>(a[row][k]) * b[k][column];
    for (int column = 0; column < kN; ++column) {
      product.d[thread + column % 8 / 2][column / 8 * 4 + half * 2 + column % 2] = truncated(sums[column]);
    }
  }
}

// Called by each thread of the warpgroup.
template <class Compute>
void order_product(float* d, const uint32_t* a, uint64_t a_descriptor, uint64_t b, bool accumulate, Compute compute) {
  WarpgroupProducts& products = own_products();
  const unsigned thread = threadIdx.x % kGroupThreads;
  const uint64_t number = products.ordered[thread]++;
  OrderedProduct& product = products.at(number);
  if (product.ordered++ == 0) {
    product.compute = compute;
    product.descriptors[0] = a_descriptor, product.descriptors[1] = b, product.accumulate = accumulate;
  } else if (product.descriptors[0] != a_descriptor || product.descriptors[1] != b || product.accumulate != accumulate) {
    host_cuda::fail("a product of which the threads of a warpgroup have different operands");
  }
  product.d[thread] = d;
  if (a) std::copy(a, a + 4, product.a[thread]);
  if (product.ordered == kGroupThreads && host_cuda::draw(2)) products.compute_before(number + 1);
}

template <typename T, int kN>
struct Wgmma {
  template <int kTransA, int kTransB>
  static void ss(float (&d)[kN / 8][4], uint64_t a, uint64_t b, bool accumulate) {
    order_product(&d[0][0], nullptr, a, b, accumulate, [](const OrderedProduct& product) {
      float left[kProductRows][kProductDepth], right[kProductDepth][kN];
      read_operand<T, kTransA>(product.descriptors[0], kProductRows, [&](int m, int k, float x) { left[m][k] = x; });
      read_operand<T, kTransB>(product.descriptors[1], kN, [&](int n, int k, float x) { right[k][n] = x; });
      multiply<kN>(left, right, product);
    });
  }

  template <int kTransB>
  static void rs(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    order_product(&d[0][0], a, 0, b, accumulate, [](const OrderedProduct& product) {
      float left[kProductRows][kProductDepth], right[kProductDepth][kN];
      for (int thread = 0; thread < kGroupThreads; ++thread)
        for (int part = 0; part < 4; ++part)
          for (int i = 0; i < 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + part % 2 * 8, k = thread % 4 * 2 + part / 2 * 8 + i;
            left[row][k] = element<T>(product.a[thread][part], i);
          }
      read_operand<T, kTransB>(product.descriptors[1], kN, [&](int n, int k, float x) { right[k][n] = x; });
      multiply<kN>(left, right, product);
    });
  }
};

}  // namespace dualkv::ptx
