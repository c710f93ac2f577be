// The host's side of the ops on heads: what is wrong with a call, in the sentences of the Python references, and the
// arguments of heads_kernel.
#pragma once
#include "heads.cuh"
#include "row_op.cuh"

namespace cutegemm {

inline void check_last_stride(const char* op, const char* name, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  CG_CHECK(last < 0 || x.size(last) <= 1 || x.stride(last) == 1, op, ": ", name, " has the strides ", text(x.strides()),
           "; its last dimension must have stride one");
}

inline void check_device_of(const char* op, const char* name, const Tensor& x, const char* of_name, const Tensor& of) {
  CG_CHECK(same_device(x, of), op, ": ", name, " is on ", text_of_device(x), "; it must be on the device of ", of_name,
           ", ", text_of_device(of));
}

inline void check_floats_like(const char* op, const char* name, const Tensor& x, const Tensor& q) {
  CG_CHECK(scalar_type(x) == scalar_type(q), op, ": ", name, " is ", text(scalar_type(x)),
           "; it must be the dtype of q, ", text(scalar_type(q)));
}

// x, which may be q itself, as heads of head_size for each token of q.
struct HeadsIn {
  const Tensor* tensor = nullptr;
  int64_t heads = 0, size = 0, token_stride = 0, head_stride = 0;

  HeadsIn() = default;
  HeadsIn(const char* op, const char* name, const Tensor& x, int64_t head_size, const Tensor& q, bool written)
      : tensor(&x), size(head_size) {
    if (&x == &q) {
      check_floats(op, name, x);
      CG_CHECK(head_size >= 1, op, ": head_size is ", head_size, "; it must be at least 1");
    } else {
      check_floats_like(op, name, x, q);
    }
    CG_CHECK(x.dim() == 2 || x.dim() == 3, op, ": ", name, " is ", text(x.sizes()),
             "; it must be (tokens, heads * head_size) or (tokens, heads, head_size)");
    CG_CHECK(x.dim() != 2 || x.size(1) % head_size == 0, op, ": ", name, " is ", text(x.sizes()),
             "; its last dimension must be a multiple of head_size, ", head_size);
    CG_CHECK(x.dim() != 3 || x.size(2) == head_size, op, ": ", name, " is ", text(x.sizes()),
             "; its last dimension must be head_size, ", head_size);
    CG_CHECK(x.size(0) == q.size(0), op, ": ", name, " is ", text(x.sizes()), "; it must have as many tokens as q, ",
             q.size(0));
    check_last_stride(op, name, x);
    heads = x.dim() == 2 ? x.size(1) / head_size : x.size(1);
    token_stride = x.stride(0);
    head_stride = x.dim() == 2 ? head_size : x.stride(1);
    if (written && x.numel() > 0) {
      std::pair<int64_t, int64_t> steps[] = {{token_stride, x.size(0)}, {head_stride, heads}};
      if (steps[1] < steps[0]) std::swap(steps[0], steps[1]);
      int64_t reach = head_size;
      for (const auto& [stride, size] : steps) {
        CG_CHECK(stride >= reach || size <= 1, op, ": ", name, " has the strides ", text(x.strides()),
                 "; its heads must not overlap, since it is written");
        reach += (size - 1) * stride;
      }
    }
    check_device_of(op, name, x, "q", q);
    CG_CHECK(head_size <= kMostHeadSize, op, ": head_size is ", head_size, "; it must be at most ", kMostHeadSize);
  }

  template <class T>
  HeadsOf<T> of() const {
    if (!tensor) return {};
    constexpr size_t align = alignof(Chunk<T>);
    const bool wide = reinterpret_cast<uintptr_t>(tensor->data_ptr()) % align == 0 &&
                      (tensor->size(0) <= 1 || token_stride * sizeof(T) % align == 0) &&
                      (heads <= 1 || head_stride * sizeof(T) % align == 0);
    return {static_cast<T*>(tensor->data_ptr()), token_stride, head_stride, int32_t(heads), int32_t(size), wide};
  }
};

inline Tensor with_last_stride(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return last < 0 || x.size(last) <= 1 || x.stride(last) == 1 ? x : torch::stable::contiguous(x);
}

// It holds the tensors while the launch is made.
struct RotationOf {
  Tensor positions, table;
  Rotation rotation{};

  RotationOf(const char* op, const Tensor& given, const Tensor& cos_sin_cache, const Tensor& q, int64_t head_size,
             bool is_neox, int64_t rope_dim_offset, bool inverse,
             const std::optional<std::vector<int64_t>>& mrope_section)
      : table(cos_sin_cache) {
    CG_CHECK(scalar_type(given) == ScalarType::Int || scalar_type(given) == ScalarType::Long, op, ": positions is ",
             text(scalar_type(given)), "; it must be torch.int32 or torch.int64");
    const std::vector<int64_t> want =
        mrope_section ? std::vector<int64_t>{3, q.size(0)} : std::vector<int64_t>{q.size(0)};
    CG_CHECK(shape_of(given) == want, op, ": positions is ", text(given.sizes()), "; it must be ", text(want), ", ",
             mrope_section ? "with mrope_section three" : "one", " for each token of q");
    check_device_of(op, "positions", given, "q", q);
    CG_CHECK(scalar_type(table) == ScalarType::Float || scalar_type(table) == scalar_type(q), op, ": cos_sin_cache is ",
             text(scalar_type(table)), "; it must be torch.float32 or the dtype of q, ", text(scalar_type(q)));
    CG_CHECK(table.dim() == 2 && table.size(1) >= 2 && table.size(1) % 2 == 0, op, ": cos_sin_cache is ",
             text(table.sizes()), "; it must be (length, rotary_dim), with a rotary_dim that is even and at least 2");
    CG_CHECK(rope_dim_offset >= 0, op, ": rope_dim_offset is ", rope_dim_offset, "; it must be at least 0");
    CG_CHECK(table.size(1) <= head_size - rope_dim_offset, op, ": cos_sin_cache is ", text(table.sizes()),
             "; its last dimension must be at most head_size - rope_dim_offset, ", head_size - rope_dim_offset);
    check_last_stride(op, "cos_sin_cache", table);
    check_device_of(op, "cos_sin_cache", table, "q", q);
    const int64_t pairs = table.size(1) / 2;
    if (mrope_section) {
      const auto& section = *mrope_section;
      CG_CHECK(section.size() == 3 && section[0] >= 0 && section[1] >= 0 && section[2] >= 0 &&
                   section[0] + section[1] + section[2] == pairs,
               op, ": mrope_section is ", text(section), "; it must be three numbers, none of them negative, that ",
               "add up to rotary_dim / 2, ", pairs);
    }
    positions = with_last_stride(given);
    const size_t element = table.element_size();
    rotation.table = table.data_ptr();
    rotation.positions = {positions.data_ptr(), scalar_type(positions) == ScalarType::Long};
    rotation.table_stride = table.stride(0);
    rotation.length = table.size(0);
    rotation.position_stride = mrope_section ? positions.stride(0) : 0;
    rotation.dtype = kernel_dtype(scalar_type(table));
    rotation.offset = int32_t(rope_dim_offset);
    rotation.pairs = int32_t(pairs);
    rotation.section_end[0] = int32_t(mrope_section ? (*mrope_section)[0] : pairs);
    rotation.section_end[1] = int32_t(mrope_section ? (*mrope_section)[0] + (*mrope_section)[1] : pairs);
    rotation.neox = is_neox;
    rotation.wide = reinterpret_cast<uintptr_t>(rotation.table) % 16 == 0 &&
                    (table.size(0) <= 1 || rotation.table_stride * element % 16 == 0) && pairs * element % 16 == 0;
    rotation.sign = inverse ? -1.f : 1.f;
  }
};

struct HeadNormOf {
  Tensor weight[2];
  HeadNorm norm{};

  HeadNormOf(const char* op, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& q,
             int64_t head_size, double eps, double weight_offset) {
    for (const auto& [i, name, given] : {std::tuple{0, "q_weight", &q_weight}, std::tuple{1, "k_weight", &k_weight}}) {
      norm.dtype[i] = CUTEGEMM_NONE;
      norm.wide[i] = true;
      if (!*given) continue;
      const Tensor& w = **given;
      CG_CHECK(scalar_type(w) == ScalarType::Float || scalar_type(w) == scalar_type(q), op, ": ", name, " is ",
               text(scalar_type(w)), "; it must be torch.float32 or the dtype of q, ", text(scalar_type(q)));
      CG_CHECK(shape_of(w) == std::vector<int64_t>{head_size}, op, ": ", name, " is ", text(w.sizes()),
               "; it must be [", head_size, "], as a head");
      check_device_of(op, name, w, "q", q);
      weight[i] = with_last_stride(w);
      norm.weight[i] = weight[i].data_ptr();
      norm.dtype[i] = kernel_dtype(scalar_type(w));
      norm.wide[i] = reinterpret_cast<uintptr_t>(norm.weight[i]) % 16 == 0;
    }
    norm.eps = float(eps), norm.offset = float(weight_offset), norm.size = int32_t(head_size),
    norm.one_over_size = 1.f / float(head_size);
  }
};

}  // namespace cutegemm
