// Rotary embedding and the norm of heads before it, in place: see rope.py.
#include "head_op.cuh"

namespace cutegemm {
namespace {

void rotate_in_place(const char* op, const HeadsIn& q, const HeadsIn& k, const Rotation& rotation,
                     const HeadNorm* norm) {
  const DeviceOf device(*q.tensor);
  with_float_type(*q.tensor, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    HeadsCall<T> call{};
    call.source[0] = q.of<T>(), call.source[1] = k.of<T>();
    call.rotation = rotation;
    if (norm) call.norm = *norm;
    run_heads<Into::kPlace>(op, call, q.tensor->size(0), norm != nullptr, device.stream);
  });
}

void rotary_embedding_(const Tensor& positions, const Tensor& q, const OptionalTensor& k, int64_t head_size,
                       const Tensor& cos_sin_cache, bool is_neox, int64_t rope_dim_offset, bool inverse,
                       const std::optional<std::vector<int64_t>>& mrope_section) {
  constexpr auto* op = "rotary_embedding_";
  const HeadsIn of_q(op, "q", q, head_size, q, true);
  const HeadsIn of_k = k ? HeadsIn(op, "k", *k, head_size, q, true) : HeadsIn();
  const RotationOf rotation(op, positions, cos_sin_cache, q, head_size, is_neox, rope_dim_offset, inverse,
                            mrope_section);
  rotate_in_place(op, of_q, of_k, rotation.rotation, nullptr);
}

void qk_norm_rope_(const Tensor& positions, const Tensor& q, const OptionalTensor& k, int64_t head_size,
                   const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& cos_sin_cache,
                   double eps, double weight_offset, bool is_neox, int64_t rope_dim_offset,
                   const std::optional<std::vector<int64_t>>& mrope_section) {
  constexpr auto* op = "qk_norm_rope_";
  const HeadsIn of_q(op, "q", q, head_size, q, true);
  const HeadsIn of_k = k ? HeadsIn(op, "k", *k, head_size, q, true) : HeadsIn();
  const HeadNormOf norm(op, q_weight, k_weight, q, head_size, eps, weight_offset);
  const RotationOf rotation(op, positions, cos_sin_cache, q, head_size, is_neox, rope_dim_offset, false, mrope_section);
  rotate_in_place(op, of_q, of_k, rotation.rotation, &norm.norm);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("rotary_embedding_", TORCH_BOX(&rotary_embedding_));
  m.impl("qk_norm_rope_", TORCH_BOX(&qk_norm_rope_));
}

}  // namespace cutegemm
