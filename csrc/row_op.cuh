// The host's side of the ops on rows: what is wrong with a call, in the sentences of the Python references, and the
// arguments of row_kernel.
#pragma once
#include "rows.cuh"

namespace cutegemm {

using OptionalTensor = std::optional<Tensor>;

inline void check_floats(const char* op, const char* name, const Tensor& x) {
  const ScalarType dtype = scalar_type(x);
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half && dtype != ScalarType::Float) {
    fail(op, ": ", name, " is ", text(dtype), "; it must be torch.bfloat16, torch.float16 or torch.float32");
  }
  CG_CHECK(x.dim() > 0, op, ": ", name, " has no dimension; it must have at least one");
}

inline void check_device(const char* op, const char* name, const Tensor& x, const Tensor& of) {
  CG_CHECK(same_device(x, of), op, ": ", name, " is on ", text_of_device(x), "; it must be on the device of x, ",
           text_of_device(of));
}

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }
inline std::string text(const std::vector<int64_t>& sizes) { return text(Sizes(sizes)); }

inline void check_like(const char* op, const char* name, const Tensor& other, const Tensor& x,
                       const std::vector<int64_t>& shape) {
  CG_CHECK(scalar_type(other) == scalar_type(x), op, ": ", name, " is ", text(scalar_type(other)),
           "; it must be the dtype of x, ", text(scalar_type(x)));
  CG_CHECK(shape_of(other) == shape, op, ": ", name, " is ", text(other.sizes()), "; it must be ",
           shape == shape_of(x) ? "the shape of x, " : "", text(shape));
  check_device(op, name, other, x);
}

// A tensor that is read, as rows; of a layout that is none, a copy.
struct Input {
  Tensor tensor;
  Rows rows;

  explicit Input(const Tensor& x) : tensor(as_rows(x) ? x : torch::stable::contiguous(x)), rows(*as_rows(tensor)) {}

  template <class T>
  RowsOf<const T> of() const {
    return rows_of<const T>(tensor.data_ptr(), rows.stride, rows.count);
  }
};

// A tensor that is written where it is.
struct Output {
  Tensor tensor;
  Rows rows;

  Output(const char* op, const char* name, const Tensor& x) : tensor(x), rows{} {
    const std::optional<Rows> found = as_rows(x);
    CG_CHECK(found && (found->count <= 1 || found->stride >= found->size), op, ": ", name, " has the strides ",
             text(x.strides()), "; its last dimension must have stride one, and its rows lie at equal distances");
    rows = *found;
  }
  explicit Output(const Tensor& made) : Output("", "", made) {}

  template <class T>
  RowsOf<T> of() const {
    return rows_of<T>(tensor.data_ptr(), rows.stride, rows.count);
  }
};

// What is written must not lie where something else is read; `same`: but it may be that tensor itself.
inline void check_apart(const char* op, const char* name, const Tensor& written, const char* other,
                        const OptionalTensor& read, bool same = false) {
  if (!read || !is_in_memory_of(written, *read)) return;
  bool is_same = same && written.data_ptr() == read->data_ptr() && shape_of(written) == shape_of(*read);
  for (int64_t i = 0; is_same && i < read->dim(); ++i) {
    is_same = read->size(i) == 1 || written.stride(i) == read->stride(i);
  }
  if (is_same) return;
  fail(op, ": ", name, " lies in the memory of ", other, "; it must ",
       same ? "be " + std::string(other) + " itself, or " : "", "lie apart from it");
}

// How a call asks for codes: the arguments of quantize_rows, see quantize.py.
struct CodesOf {
  const char* op;
  ScalarType dtype;
  const OptionalTensor& scale;
  const std::string& granularity;
  int64_t group_size;
  const OptionalTensor& scale_ub;
  bool column_major_scale, power_of_two_scale;

  void check(const Tensor& x, int64_t k, std::initializer_list<const char*> granularities) const {
    const auto is = [&](const char* name) { return granularity == name; };
    if (std::none_of(granularities.begin(), granularities.end(), is)) {
      std::string names;
      for (size_t i = 0; i < granularities.size(); ++i) {
        names += (i == 0                         ? "'"
                  : i + 1 < granularities.size() ? ", '"
                                                 : " or '") +
                 std::string(granularities.begin()[i]) + "'";
      }
      fail(op, ": granularity is '", granularity, "'; it must be ", names);
    }
    CG_CHECK(group_size == 64 || group_size == 128, op, ": group_size is ", group_size, "; it must be 64 or 128");
    if (scale_ub) {
      CG_CHECK(scalar_type(*scale_ub) == ScalarType::Float && scale_ub->numel() == 1, op, ": scale_ub is ",
               text(scalar_type(*scale_ub)), " of ", text(scale_ub->sizes()),
               "; it must be one element of torch.float32");
      check_device(op, "scale_ub", *scale_ub, x);
    }
    if (!scale) return;
    for (const auto& [name, given] :
         {std::pair{"scale_ub", scale_ub.has_value()}, std::pair{"power_of_two_scale", power_of_two_scale}}) {
      CG_CHECK(!given, op, ": ", name, " is given with scale; it must be left out, since it is for a computed scale");
    }
    CG_CHECK(scalar_type(*scale) == ScalarType::Float, op, ": scale is ", text(scalar_type(*scale)),
             "; it must be torch.float32");
    check_device(op, "scale", *scale, x);
    if (granularity == "tensor") {
      CG_CHECK(scale->numel() == 1, op, ": scale is ", text(scale->sizes()),
               "; for granularity 'tensor' it must have one element");
    } else if (one_a_row()) {
      CG_CHECK(is_one_a_row(*scale, x), op, ": scale is ", text(scale->sizes()), "; for granularity '", granularity,
               "' it must have one element for each row of x, which is ", text(x.sizes()));
    } else {
      CG_CHECK(shape_of(*scale) == scale_shape(x, k), op, ": scale is ", text(scale->sizes()), "; for granularity '",
               granularity, "' it must be ", text(scale_shape(x, k)));
    }
  }

  // Of the ops that quantize what they compute.
  void check_fused(const Tensor& x, int64_t k) const {
    const bool int8 = dtype == ScalarType::Char;
    CG_CHECK(int8 || dtype == ScalarType::Float8_e4m3fn, op, ": dtype is ", text(dtype),
             "; it must be torch.float8_e4m3fn or torch.int8");
    int8 ? check(x, k, {"tensor", "token"}) : check(x, k, {"tensor", "token", "group"});
    CG_CHECK(granularity != "tensor" || scale, op, ": scale is None; for granularity 'tensor' it must be given");
  }

  bool one_a_row() const { return granularity == "token" || granularity == "channel"; }

  std::vector<int64_t> scale_shape(const Tensor& x, int64_t k) const {
    std::vector<int64_t> shape = shape_of(x);
    shape.pop_back();
    if (granularity == "tensor") return {};
    if (granularity == "token") shape.push_back(1);
    if (granularity == "group") shape.push_back((k + group_size - 1) / group_size);
    if (granularity == "block") {
      shape.back() = (shape.back() + 127) / 128;
      shape.push_back((k + 127) / 128);
    }
    return shape;
  }

 private:
  static bool is_one_a_row(const Tensor& scale, const Tensor& x) {
    using Shape = std::vector<int64_t>;
    Shape leading = shape_of(x), column = leading;
    leading.pop_back();
    column.back() = 1;
    int64_t rows = 1;
    for (int64_t size : leading) rows *= size;
    const Shape shape = shape_of(scale);
    return shape == leading || shape == column || shape == Shape{rows} || shape == Shape{rows, 1} ||
           shape == Shape{1, rows};
  }
};

// What a call returns of codes, and the kernel's side of it. It holds the tensors while the launch is made.
struct Codes {
  Tensor q, scale, given, bound;
  Quantization to{};

  // k: how many values a row of x becomes.
  Codes(const CodesOf& how, const Tensor& x, int64_t k) {
    std::vector<int64_t> shape = shape_of(x);
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    shape.back() = k;
    q = empty(shape, how.dtype, x);
    const std::vector<int64_t> of_scale = how.scale_shape(x, k);
    const bool grouped = how.granularity == "group";
    const bool columns = grouped && how.column_major_scale;
    const int64_t pitch = (rows + 3) / 4 * 4;  // 16 bytes, as TMA asks
    std::vector<int64_t> strides = contiguous_strides(of_scale);
    if (columns && rows > 0) {
      for (int64_t& stride : strides) stride /= std::max<int64_t>(1, of_scale.back());
      strides.back() = pitch;
    }
    scale = empty_strided(of_scale, strides, ScalarType::Float, x);
    to.q = static_cast<uint8_t*>(q.data_ptr());
    to.q_stride = k;
    to.q_wide = rows <= 1 || k % kChunk == 0;
    to.int8 = how.dtype == ScalarType::Char;
    to.power_of_two = how.power_of_two_scale;
    to.is_special = how.power_of_two_scale || how.scale_ub;
    to.group_shift = !grouped ? 0 : how.group_size == 64 ? 6 : 7;
    to.largest = to.int8 ? kInt8Max : kE4m3Max;
    to.reciprocal = 1.f / to.largest;
    to.scale = static_cast<float*>(scale.data_ptr());
    if (grouped) {
      to.stride[0] = columns ? 1 : of_scale.back();
      to.stride[1] = columns ? pitch : 1;
    } else {
      to.stride[0] = how.one_a_row();
    }
    to.scales = grouped ? Scales::kOfGroup : how.one_a_row() ? Scales::kOfToken : Scales::kOfTensor;
    if (how.scale) {
      to.scales = Scales::kGiven;
      given = how.scale->is_contiguous() ? *how.scale : torch::stable::contiguous(*how.scale);
      to.given = static_cast<const float*>(given.data_ptr());
      to.given_stride[0] = grouped ? of_scale.back() : how.one_a_row();
      to.given_stride[1] = grouped;
    }
    if (how.scale_ub) {
      bound = *how.scale_ub;
      to.bound = static_cast<const float*>(bound.data_ptr());
    }
  }
};

// The same of an op that quantizes what it computes, and that writes the values too where `given` is there for them.
struct FusedCodes {
  std::optional<Output> values;
  std::optional<Codes> codes;

  FusedCodes(const CodesOf& how, const Tensor& x, int64_t k, const char* name, const OptionalTensor& given) {
    how.check_fused(x, k);
    if (given) values.emplace(how.op, name, *given);
    const DeviceOf device(x);
    codes.emplace(how, x, k);
  }

  const Output* out() const { return values ? &*values : nullptr; }
  const Quantization& to() const { return codes->to; }
  std::tuple<Tensor, Tensor> result() const { return {codes->q, codes->scale}; }
};

}  // namespace cutegemm
