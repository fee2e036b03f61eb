// One argument of a call as conditions see it, for boxed and unboxed calls alike.
//
// It is a view: it owns nothing, and creating one changes no reference count.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace opgraft {

class Argument {
 public:
  enum class Kind : uint8_t {
    None,  // an undefined tensor too
    Tensor,
    Integer,  // dtypes, layouts and memory formats too
    Bool,
    Real,
    Complex,
    Text,
    Device,
    List,
    Other,  // what conditions cannot use: a generator, a symbolic size
  };

  Argument() = default;

  static Argument of(const at::Tensor& value) noexcept { return of(*value.unsafeGetTensorImpl()); }
  static Argument of(const c10::TensorImpl& value) noexcept {
    Argument made;
    if (&value == static_cast<c10::TensorImpl*>(c10::UndefinedTensorImpl::singleton())) return made;
    made.kind_ = Kind::Tensor;
    made.tensor_ = &value;
    return made;
  }
  static Argument of(int64_t value) noexcept { return integer(Kind::Integer, value); }
  static Argument of(bool value) noexcept { return integer(Kind::Bool, value ? 1 : 0); }
  static Argument of(double value) noexcept {
    Argument made;
    made.kind_ = Kind::Real;
    made.real_ = value;
    return made;
  }
  static Argument of(c10::complex<double> value) noexcept {
    Argument made = of(value.real());
    made.kind_ = Kind::Complex;
    made.imaginary_ = value.imag();
    return made;
  }
  static Argument of(c10::ScalarType value) noexcept { return of(static_cast<int64_t>(value)); }
  static Argument of(c10::Layout value) noexcept { return of(static_cast<int64_t>(value)); }
  static Argument of(c10::MemoryFormat value) noexcept { return of(static_cast<int64_t>(value)); }
  static Argument of(c10::Device value) noexcept {
    // The index is -1 if the device has none.
    return integer(Kind::Device, static_cast<int64_t>(value.type()) * 256 + value.index());
  }
  static Argument of(std::string_view value) noexcept {
    return many(Kind::Text, value.data(), value.size());
  }
  static Argument of(const c10::SymInt& value) {
    const auto known = value.maybe_as_int();
    return known ? of(*known) : other();
  }
  static Argument of(const c10::Scalar& value) {
    if (value.isSymbolic()) return other();
    if (value.isFloatingPoint()) return of(value.toDouble());
    if (value.isComplex()) return of(value.toComplexDouble());
    if (value.isBoolean()) return of(value.toBool());
    if (value.type() == c10::ScalarType::UInt64) return other();  // beyond 63 bits
    return of(value.toLong());
  }
  static Argument of(const std::optional<at::Generator>&) noexcept { return other(); }
  template <class T>
  static Argument of(const std::optional<T>& value) {
    return value ? of(*value) : Argument();
  }
  template <class T>
  static Argument of(const c10::OptionalArrayRef<T>& value) {
    return value ? of(*value) : Argument();
  }

  static Argument of(c10::ArrayRef<c10::IValue> value) noexcept {
    return list(Items::Values, value);
  }
  static Argument of(c10::ArrayRef<at::Tensor> value) noexcept {
    return list(Items::Tensors, value);
  }
  static Argument of(c10::ArrayRef<int64_t> value) noexcept { return list(Items::Integers, value); }
  static Argument of(c10::SymIntArrayRef value) noexcept { return list(Items::Symbols, value); }
  static Argument of(c10::ArrayRef<double> value) noexcept { return list(Items::Reals, value); }
  static Argument of(c10::ArrayRef<c10::Scalar> value) noexcept {
    return list(Items::Scalars, value);
  }
  template <size_t Size>
  static Argument of(const std::array<bool, Size>& value) noexcept {
    return list(Items::Bools, c10::ArrayRef<bool>(value.data(), Size));
  }
  template <class T>
  static Argument of(const c10::List<T>& value) {
    // The IValue refers to the same list, so the items live as long as `value`.
    return of(c10::IValue(value).toListRef());
  }
  static Argument of(const at::ITensorListRef& value) {
    if (value.isUnboxed()) return of(value.toUnboxed());
    if (value.isBoxed()) return of(value.toBoxed());
    const auto& references = value.toMaterialized();
    return many(Kind::List, references.data(), references.size(), Items::References);
  }

  static Argument of(const c10::IValue& value) {
    if (value.isTensor()) return of(*value.unsafeToTensorImpl());
    if (value.isNone()) return {};
    if (value.isInt()) return of(value.toInt());
    if (value.isBool()) return of(value.toBool());
    if (value.isDouble()) return of(value.toDouble());
    if (value.isList()) return of(value.toListRef());
    if (value.isComplexDouble()) return of(value.toComplexDouble());
    if (value.isString()) return of(value.toStringView());
    if (value.isDevice()) return of(value.toDevice());
    return other();
  }

  Kind kind() const noexcept { return kind_; }
  bool is_none() const noexcept { return kind_ == Kind::None; }
  bool is_list() const noexcept { return kind_ == Kind::List; }

  // The tensor; nullptr if it is none.
  const c10::TensorImpl* tensor() const noexcept {
    return kind_ == Kind::Tensor ? tensor_ : nullptr;
  }
  int64_t integer() const noexcept { return integer_; }
  double real() const noexcept { return real_; }
  // Only for Kind::Device.
  c10::Device device() const noexcept {
    const int64_t type = (integer_ + 1) / 256;
    return {static_cast<c10::DeviceType>(type),
            static_cast<c10::DeviceIndex>(integer_ - type * 256)};
  }
  double imaginary() const noexcept { return imaginary_; }
  size_t size() const noexcept { return size_; }
  std::string_view text() const noexcept { return {static_cast<const char*>(data_), size_}; }

  // Whether it is a list that may hold tensors.
  bool may_hold_tensors() const noexcept {
    return kind_ == Kind::List &&
           (items_ == Items::Values || items_ == Items::Tensors || items_ == Items::References);
  }

  Argument item(size_t index) const {
    switch (items_) {
      case Items::Values:
        return of(static_cast<const c10::IValue*>(data_)[index]);
      case Items::Tensors:
        return of(static_cast<const at::Tensor*>(data_)[index]);
      case Items::References:
        return of(static_cast<const std::reference_wrapper<const at::Tensor>*>(data_)[index].get());
      case Items::Integers:
        return of(static_cast<const int64_t*>(data_)[index]);
      case Items::Symbols:
        return of(static_cast<const c10::SymInt*>(data_)[index]);
      case Items::Reals:
        return of(static_cast<const double*>(data_)[index]);
      case Items::Bools:
        return of(static_cast<const bool*>(data_)[index]);
      case Items::Scalars:
        return of(static_cast<const c10::Scalar*>(data_)[index]);
    }
    return other();
  }

  // Whether two values are equal. Not for lists, tensors, Real and Complex.
  bool equals(const Argument& other) const noexcept {
    if (kind_ != other.kind_) return false;
    if (kind_ == Kind::Text) return text() == other.text();
    return kind_ == Kind::None || integer_ == other.integer_;
  }

 private:
  enum class Items : uint8_t {
    Values,
    Tensors,
    References,
    Integers,
    Symbols,
    Reals,
    Bools,
    Scalars
  };

  static Argument other() noexcept {
    Argument made;
    made.kind_ = Kind::Other;
    return made;
  }
  static Argument integer(Kind kind, int64_t value) noexcept {
    Argument made;
    made.kind_ = kind;
    made.integer_ = value;
    return made;
  }
  static Argument many(Kind kind, const void* data, size_t size,
                       Items items = Items::Values) noexcept {
    Argument made;
    made.kind_ = kind;
    made.items_ = items;
    made.data_ = data;
    made.size_ = size;
    return made;
  }
  template <class T>
  static Argument list(Items items, c10::ArrayRef<T> value) noexcept {
    return many(Kind::List, value.data(), value.size(), items);
  }

  Kind kind_ = Kind::None;
  Items items_ = Items::Values;
  union {
    int64_t integer_ = 0;
    double real_;
    const c10::TensorImpl* tensor_;
    const void* data_;
  };
  union {
    size_t size_ = 0;
    double imaginary_;
  };
};

// Nearly every op has few enough arguments for no allocation.
using Arguments = c10::SmallVector<Argument, 16>;

inline Arguments view(c10::ArrayRef<c10::IValue> values) {
  Arguments made;
  made.reserve(values.size());
  for (const auto& value : values) made.push_back(Argument::of(value));
  return made;
}

}  // namespace opgraft
