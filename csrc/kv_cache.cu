// Keys and values into a paged cache and out of it, alone or after the norm and rotation of heads: see kv_cache.py.
#include "head_op.cuh"

namespace cutegemm {
namespace {

bool is_fp8(const Tensor& x) {
  return scalar_type(x) == ScalarType::Float8_e4m3fn || scalar_type(x) == ScalarType::Float8_e5m2;
}

// Where block, slot, head and value are in a cache's dimensions.
struct Layout {
  int block, slot, head, value;

  Layout(const char* op, const std::string& name) {
    CG_CHECK(name == "NHD" || name == "HND" || name == "v1", op, ": layout is '", name,
             "'; it must be 'NHD', 'HND' or 'v1'");
    block = 0, slot = name == "NHD" ? 1 : name == "HND" ? 2 : 3, head = name == "NHD" ? 2 : 1;
    value = name == "v1" ? 2 : 3;
  }
};

// A cache whose shape is checked, and what its FP8 is scaled with.
struct CacheIn {
  Tensor tensor, scale, scale_cache;
  int64_t blocks, block_size, heads, size;
  CacheOf of{};

  CacheIn(const Tensor& cache, const Layout& layout) : tensor(cache) {
    const bool grouped = cache.dim() == 5;
    blocks = cache.size(layout.block), block_size = cache.size(layout.slot), heads = cache.size(layout.head);
    size = cache.size(layout.value) * (grouped ? cache.size(4) : 1);
    of.data = cache.data_ptr();
    of.block_stride = cache.stride(layout.block);
    of.token_stride = cache.stride(layout.slot);
    of.head_stride = cache.stride(layout.head);
    const bool contiguous = layout.value == 3;
    of.run_stride = contiguous ? 0 : cache.stride(layout.value);
    while (grouped && int64_t(1) << of.run_shift < cache.size(4)) ++of.run_shift;
    const size_t element = cache.element_size(), align = std::min<size_t>(element * kChunk, 16);
    of.wide = reinterpret_cast<uintptr_t>(of.data) % align == 0;
    for (int64_t i = 0; i < cache.dim() - 1; ++i) {
      of.wide = of.wide && (cache.size(i) <= 1 || cache.stride(i) * element % align == 0);
    }
  }

  void take_scales(const char* op, const char* scale_name, const OptionalTensor& given_scale,
                   const char* scale_cache_name, const OptionalTensor& given_cache) {
    for (const auto& [name, given] : {std::pair{scale_name, &given_scale}, std::pair{scale_cache_name, &given_cache}}) {
      if (!*given) continue;
      CG_CHECK(is_fp8(tensor), op, ": ", name, " is given, and the cache is ", text(scalar_type(tensor)),
               "; it must be left out, since only FP8 is stored with a scale");
      CG_CHECK(scalar_type(**given) == ScalarType::Float, op, ": ", name, " is ", text(scalar_type(**given)),
               "; it must be torch.float32");
      check_device_of(op, name, **given, "the cache", tensor);
    }
    CG_CHECK(!given_scale || !given_cache, op, ": ", scale_name, " is given with ", scale_cache_name,
             "; one of them must be left out");
    if (given_scale) {
      const bool of_heads = shape_of(*given_scale) == std::vector<int64_t>{heads};
      if (given_scale->numel() != 1 && !of_heads) {
        fail(op, ": ", scale_name, " is ", text(given_scale->sizes()), "; it must have one element",
             heads == 1 ? "" : " or be [" + std::to_string(heads) + "], one for each head");
      }
      scale = *given_scale;
      of.scale = static_cast<const float*>(scale.data_ptr());
      of.scale_stride = given_scale->numel() == 1 ? 0 : int32_t(scale.stride(0));
    }
    if (given_cache) {
      const std::vector<int64_t> want = {blocks, block_size, heads};
      CG_CHECK(shape_of(*given_cache) == want, op, ": ", scale_cache_name, " is ", text(given_cache->sizes()),
               "; it must be ", text(want), ", the cache's blocks, block size and heads");
      scale_cache = *given_cache;
      of.scale_cache = static_cast<float*>(scale_cache.data_ptr());
      for (int i = 0; i < 3; ++i) of.scale_strides[i] = scale_cache.stride(i);
    }
  }
};

// A shape in which a name stands for any size.
struct Dimension {
  std::string text;
  int64_t size;  // negative: any

  Dimension(const char* name) : text(name), size(-1) {}
  Dimension(int64_t size) : text(std::to_string(size)), size(size) {}
};
using Shape = std::vector<Dimension>;

bool is_of_shape(const Tensor& x, const Shape& shape) {
  if (x.dim() != int64_t(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i].size >= 0 && shape[i].size != x.size(i)) return false;
  }
  return true;
}

std::string text_of(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + shape[i].text;
  return s + "]";
}

void check_rows(const char* op, const char* name, const Tensor& x, const Shape& shape, const char* of_name,
                const Tensor& of) {
  CG_CHECK(scalar_type(x) == scalar_type(of), op, ": ", name, " is ", text(scalar_type(x)),
           "; it must be the dtype of ", of_name, ", ", text(scalar_type(of)));
  CG_CHECK(is_of_shape(x, shape), op, ": ", name, " is ", text(x.sizes()), "; it must be ", text_of(shape));
  check_last_stride(op, name, x);
  check_device_of(op, name, x, of_name, of);
}

void check_cache(const char* op, const char* name, const Tensor& cache, const Shape& shape, const std::string& layout,
                 const char* of_name, const Tensor& of) {
  CG_CHECK(is_of_shape(cache, shape), op, ": ", name, " is ", text(cache.sizes()), "; ",
           layout.empty() ? "" : "for layout '" + layout + "' ", "it must be ", text_of(shape));
  check_last_stride(op, name, cache);
  check_device_of(op, name, cache, of_name, of);
}

void check_cache_dtype(const char* op, const char* name, const Tensor& cache, const char* of_name, const Tensor& of) {
  CG_CHECK(scalar_type(cache) == scalar_type(of) || is_fp8(cache), op, ": ", name, " is ", text(scalar_type(cache)),
           "; it must be the dtype of ", of_name, ", ", text(scalar_type(of)),
           ", or torch.float8_e4m3fn or torch.float8_e5m2");
}

Shape cache_shape(const std::string& layout, Dimension blocks, Dimension block_size, int64_t heads, int64_t head_size,
                  int64_t x) {
  if (layout == "NHD") return {blocks, block_size, heads, head_size};
  if (layout == "HND") return {blocks, heads, block_size, head_size};
  return x ? Shape{blocks, heads, head_size / x, block_size, x} : Shape{blocks, heads, head_size, block_size};
}

// It holds the tensor while the launch is made.
struct SlotsOf {
  Tensor tensor;
  Slots slots{};

  SlotsOf(const char* op, const Tensor& given, const char* of_name, const Tensor& of) {
    CG_CHECK(scalar_type(given) == ScalarType::Int || scalar_type(given) == ScalarType::Long, op, ": slot_mapping is ",
             text(scalar_type(given)), "; it must be torch.int32 or torch.int64");
    CG_CHECK(given.dim() == 1, op, ": slot_mapping is ", text(given.sizes()), "; it must have one dimension");
    check_device_of(op, "slot_mapping", given, of_name, of);
    tensor = with_last_stride(given);
    slots.given.data = tensor.data_ptr();
    slots.count = tensor.size(0);
    slots.given.is_long = scalar_type(tensor) == ScalarType::Long;
  }

  void of_tokens(const char* op, const char* of_name, const Tensor& of) const {
    CG_CHECK(slots.count <= of.size(0), op, ": slot_mapping has ", slots.count, " slots; it must have at most ",
             of.size(0), ", one for each token of ", of_name);
  }
  void in(const char* op, const CacheIn& cache) {
    slots.block_size = uint32_t(std::max<int64_t>(cache.block_size, 1));
    slots.block_shift = -1;
    for (int i = 0; i < 32; ++i) {
      if (slots.block_size == 1u << i) slots.block_shift = i;
    }
    slots.end = cache.blocks * cache.block_size;
    CG_CHECK(slots.end < int64_t(1) << 32, op, ": the cache has ", slots.end, " slots; it must have less than 2**32");
  }
};

// Of k and v, as (tokens, heads, head_size), into their caches.
struct WriteOf {
  std::optional<CacheIn> k, v;
  std::optional<SlotsOf> slots;

  // head_size of k and of v; heads of both.
  WriteOf(const char* op, const Tensor& k_in, int64_t tokens, int64_t heads, int64_t k_size, int64_t v_size,
          const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping, const std::string& layout_name,
          const OptionalTensor& k_scale, const OptionalTensor& v_scale, const OptionalTensor& k_scale_cache,
          const OptionalTensor& v_scale_cache) {
    const Layout layout(op, layout_name);
    check_cache_dtype(op, "k_cache", k_cache, "k", k_in);
    CG_CHECK(scalar_type(v_cache) == scalar_type(k_cache), op, ": v_cache is ", text(scalar_type(v_cache)),
             "; it must be the dtype of k_cache, ", text(scalar_type(k_cache)));
    const int64_t x = layout_name == "v1" ? 16 / int64_t(k_cache.element_size()) : 0;
    CG_CHECK(x == 0 || k_size % x == 0, op, ": k has heads of ", k_size, "; for layout 'v1' it must be a multiple of ",
             x, ", 16 bytes");
    check_cache(op, "k_cache", k_cache, cache_shape(layout_name, "blocks", "block_size", heads, k_size, x), layout_name,
                "k", k_in);
    k.emplace(k_cache, layout);
    check_cache(op, "v_cache", v_cache, cache_shape(layout_name, k->blocks, k->block_size, heads, v_size, 0),
                layout_name, "k", k_in);
    v.emplace(v_cache, layout);
    slots.emplace(op, slot_mapping, "k", k_in);
    slots->of_tokens(op, "k", k_in);
    k->take_scales(op, "k_scale", k_scale, "k_scale_cache", k_scale_cache);
    v->take_scales(op, "v_scale", v_scale, "v_scale_cache", v_scale_cache);
    slots->in(op, *k);
    for (const auto& [name, size] : {std::pair{"k", k_size}, std::pair{"v", v_size}}) {
      CG_CHECK(size <= kMostHeadSize, op, ": ", name, " has heads of ", size, "; it must have at most ", kMostHeadSize);
    }
  }
};

HeadsIn heads_of(const Tensor& x) {  // of a checked (tokens, heads, head_size)
  HeadsIn in;
  in.tensor = &x, in.heads = x.size(1), in.size = x.size(2), in.token_stride = x.stride(0),
  in.head_stride = x.stride(1);
  return in;
}

void write(const char* op, const HeadsIn* q, const HeadsIn& k, const HeadsIn& v, const CacheIn& k_cache,
           const CacheIn& v_cache, const Slots& slots, const Rotation* rotation, const HeadNorm* norm) {
  const DeviceOf device(*k.tensor);
  with_float_type(*k.tensor, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    HeadsCall<T> call{};
    if (q && (norm || rotation)) call.source[0] = q->of<T>();
    call.source[1] = k.of<T>(), call.source[2] = v.of<T>();
    if (rotation) call.rotation = *rotation;
    if (norm) call.norm = *norm;
    call.slots = slots;
    call.cache[0] = k_cache.of, call.cache[1] = v_cache.of;
    call.e5m2 = scalar_type(k_cache.tensor) == ScalarType::Float8_e5m2;
    call.computes_scales = k_cache.of.scale_cache || v_cache.of.scale_cache;
    const int64_t tokens = q ? q->tensor->size(0) : slots.count;
    // v1's values lie apart. Of many tokens, neighbours have the same block, and their values are written together, and
    // their keys with them where nothing else is to be done; with few, it is quicker in one launch, head by head.
    const bool many = tokens >= (q ? 256 : 128), by_tokens = v_cache.of.run_stride != 0 && many;
    const bool fp8 = is_fp8(k_cache.tensor);
    HeadsCall<T> apart = call;
    if (by_tokens) (q ? apart.source[1] : call.source[1]) = {}, call.source[2] = {};
    if (fp8) {
      run_heads<Into::kFp8Cache>(op, call, tokens, norm != nullptr, device.stream);
      if (by_tokens) run_v1<true>(op, apart, device.stream);
    } else {
      run_heads<Into::kCache>(op, call, tokens, norm != nullptr, device.stream);
      if (by_tokens) run_v1<false>(op, apart, device.stream);
    }
  });
}

void reshape_and_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slot_mapping, const std::string& layout, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale, const OptionalTensor& k_scale_cache,
                        const OptionalTensor& v_scale_cache) {
  constexpr auto* op = "reshape_and_cache_";
  check_floats(op, "k", k);
  CG_CHECK(k.dim() == 3, op, ": k is ", text(k.sizes()), "; it must be [tokens, heads, head_size]");
  check_last_stride(op, "k", k);
  check_rows(op, "v", v, {k.size(0), k.size(1), "head_size"}, "k", k);
  const WriteOf to(op, k, k.size(0), k.size(1), k.size(2), v.size(2), k_cache, v_cache, slot_mapping, layout, k_scale,
                   v_scale, k_scale_cache, v_scale_cache);
  write(op, nullptr, heads_of(k), heads_of(v), *to.k, *to.v, to.slots->slots, nullptr, nullptr);
}

void concat_and_cache_mla_(const Tensor& kv_c, const Tensor& k_pe, const Tensor& kv_cache, const Tensor& slot_mapping,
                           const OptionalTensor& scale) {
  constexpr auto* op = "concat_and_cache_mla_";
  check_floats(op, "kv_c", kv_c);
  CG_CHECK(kv_c.dim() == 2, op, ": kv_c is ", text(kv_c.sizes()), "; it must be [tokens, rank]");
  check_last_stride(op, "kv_c", kv_c);
  check_rows(op, "k_pe", k_pe, {kv_c.size(0), "rope"}, "kv_c", kv_c);
  check_cache_dtype(op, "kv_cache", kv_cache, "kv_c", kv_c);
  const int64_t rank = kv_c.size(1), rope = k_pe.size(1);
  check_cache(op, "kv_cache", kv_cache, {"blocks", "block_size", rank + rope}, "", "kv_c", kv_c);
  SlotsOf slots(op, slot_mapping, "kv_c", kv_c);
  slots.of_tokens(op, "kv_c", kv_c);
  // Two heads of one cache: the rotated part lies behind the other.
  CacheIn cache(torch::stable::unsqueeze(kv_cache, 2), Layout(op, "NHD"));
  cache.take_scales(op, "scale", scale, "", {});
  slots.in(op, cache);
  CG_CHECK(rank <= kMostHeadSize && rope <= kMostHeadSize, op, ": kv_c is ", text(kv_c.sizes()), " and k_pe ",
           text(k_pe.sizes()), "; their last dimensions must be at most ", kMostHeadSize);
  CacheIn behind = cache;
  const size_t element = kv_cache.element_size();
  behind.of.data = static_cast<char*>(cache.of.data) + rank * element;
  behind.of.wide = cache.of.wide && rank % kChunk == 0 && rank * element % 16 == 0;
  const auto head = [](const Tensor& x) {
    HeadsIn in;
    in.tensor = &x, in.heads = 1, in.size = x.size(1), in.token_stride = x.stride(0), in.head_stride = x.size(1);
    return in;
  };
  write(op, nullptr, head(kv_c), head(k_pe), cache, behind, slots.slots, nullptr, nullptr);
}

void qk_norm_rope_and_cache_(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& v,
                             int64_t head_size, const OptionalTensor& cos_sin_cache, const Tensor& k_cache,
                             const Tensor& v_cache, const Tensor& slot_mapping, const OptionalTensor& q_weight,
                             const OptionalTensor& k_weight, double eps, double weight_offset, bool norm, bool is_neox,
                             int64_t rope_dim_offset, const std::optional<std::vector<int64_t>>& mrope_section,
                             const std::string& layout, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                             const OptionalTensor& k_scale_cache, const OptionalTensor& v_scale_cache) {
  constexpr auto* op = "qk_norm_rope_and_cache_";
  const HeadsIn of_q(op, "q", q, head_size, q, true), of_k(op, "k", k, head_size, q, false);
  HeadsIn of_v = v.dim() == 2 ? HeadsIn(op, "v", v, head_size, q, false) : HeadsIn();
  for (const auto& [name, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}}) {
    CG_CHECK(norm || !*weight, op, ": ", name, " is given, and norm is False; it must be left out, or norm be True");
  }
  const HeadNormOf norms(op, q_weight, k_weight, q, head_size, eps, weight_offset);
  std::optional<RotationOf> rotation;
  if (cos_sin_cache) {
    rotation.emplace(op, positions, *cos_sin_cache, q, head_size, is_neox, rope_dim_offset, false, mrope_section);
  }
  if (v.dim() != 2) {
    check_rows(op, "v", v, {k.size(0), of_k.heads, "head_size"}, "k", k);
    of_v = heads_of(v);
  } else {
    CG_CHECK(of_v.heads == of_k.heads, op, ": v is ", text_of(Shape{v.size(0), of_v.heads, head_size}), "; it must be ",
             text_of(Shape{k.size(0), of_k.heads, "head_size"}));
  }
  const WriteOf to(op, k, k.size(0), of_k.heads, head_size, of_v.size, k_cache, v_cache, slot_mapping, layout, k_scale,
                   v_scale, k_scale_cache, v_scale_cache);
  write(op, &of_q, of_k, of_v, *to.k, *to.v, to.slots->slots, rotation ? &rotation->rotation : nullptr,
        norm ? &norms.norm : nullptr);
}

Tensor gather_cache(const Tensor& cache, const Tensor& slot_mapping, const std::string& layout_name,
                    const OptionalTensor& scale, const OptionalTensor& scale_cache, const OptionalDtype& dtype) {
  constexpr auto* op = "gather_cache";
  const Layout layout(op, layout_name);
  const ScalarType held = scalar_type(cache);
  const auto is_float = [](ScalarType type) {
    return type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
  };
  CG_CHECK(is_float(held) || is_fp8(cache), op, ": cache is ", text(held),
           "; it must be torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn or torch.float8_e5m2");
  const int64_t x = 16 / int64_t(cache.element_size());
  std::vector<Shape> shapes = {{"blocks", "block_size", "heads", "head_size"}};
  if (layout_name == "HND") shapes = {{"blocks", "heads", "block_size", "head_size"}};
  if (layout_name == "v1") {
    shapes = {{"blocks", "heads", "head_size / x", "block_size", x}, {"blocks", "heads", "head_size", "block_size"}};
  }
  bool known = false;
  std::string wanted;
  for (const Shape& shape : shapes) {
    known |= is_of_shape(cache, shape);
    wanted += (wanted.empty() ? "" : " or ") + text_of(shape);
  }
  CG_CHECK(known, op, ": cache is ", text(cache.sizes()), "; for layout '", layout_name, "' it must be ", wanted);
  check_last_stride(op, "cache", cache);
  SlotsOf slots(op, slot_mapping, "cache", cache);
  CacheIn from(cache, layout);
  from.take_scales(op, "scale", scale, "scale_cache", scale_cache);
  const ScalarType type = scalar_type(dtype, is_fp8(cache) ? ScalarType::BFloat16 : held);
  CG_CHECK(is_float(type), op, ": dtype is ", text(type),
           "; it must be torch.bfloat16, torch.float16 or torch.float32");
  slots.in(op, from);
  const DeviceOf device(cache);
  const Tensor out = empty({slots.slots.count, from.heads, from.size}, type, cache);
  if (out.numel() == 0) return out;
  const int64_t threads = from.heads * ((from.size + kChunk - 1) / kChunk);
  const dim3 blocks(unsigned(slots.slots.count), unsigned((threads + kHeadThreads - 1) / kHeadThreads));
  with_float_type(out, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    const auto run = [&](auto kernel) {
      launch(op, kernel, blocks, dim3(kHeadThreads), device.stream, slots.slots, from.of, int(from.heads),
             int(from.size), static_cast<T*>(out.data_ptr()));
    };
    if (held == ScalarType::Float8_e4m3fn) return run(gather_heads<T, uint8_t, false>);
    if (held == ScalarType::Float8_e5m2) return run(gather_heads<T, uint8_t, true>);
    if (held == ScalarType::BFloat16) return run(gather_heads<T, __nv_bfloat16, false>);
    if (held == ScalarType::Half) return run(gather_heads<T, __half, false>);
    run(gather_heads<T, float, false>);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("reshape_and_cache_", TORCH_BOX(&reshape_and_cache_));
  m.impl("concat_and_cache_mla_", TORCH_BOX(&concat_and_cache_mla_));
  m.impl("qk_norm_rope_and_cache_", TORCH_BOX(&qk_norm_rope_and_cache_));
  m.impl("gather_cache", TORCH_BOX(&gather_cache));
}

}  // namespace cutegemm
