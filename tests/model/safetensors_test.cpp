// SafeTensors against files made here byte by byte, and against real ones where they are at hand.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <random>

#include "model/hf_files.hpp"
#include "support/places.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

using test::TempDir;
namespace fs = std::filesystem;

std::string u64(std::uint64_t n) {
  return std::string(reinterpret_cast<const char*>(&n), sizeof n);
}
// A file of this header and `data_bytes` bytes of data, 0, 1, 2, ...
std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string text = u64(header.size()) + header;
  for (std::size_t i = 0; i < data_bytes; ++i) text += static_cast<char>(i);
  return text;
}
// The error that opening gives, or nothing.
std::optional<Error> open_error(const std::string& path) {
  return test::thrown_by([&] { const SafeTensors file(path); });
}

class SafeTensorsTest : public ::testing::Test {
 protected:
  std::string put(const std::string& bytes) {
    // A new file each time: ext4 flushes one that is truncated, which takes milliseconds.
    fs::remove(dir_ / "t.safetensors");
    return test::write_file(dir_ / "t.safetensors", bytes);
  }
  TempDir dir_;
};

TEST_F(SafeTensorsTest, ReadsNamesShapesBytesAndMetadata) {
  const std::string header =
      R"({"__metadata__":{"format":"pt","note":""},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[2,26]},)"
      R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"z":{"dtype":"F64","shape":[3,0,7],"data_offsets":[26,26]}})";
  const SafeTensors file(put(file_of(header + "   ", 26)));
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.entries()[0].name, "a");  // by place
  EXPECT_EQ(file.entries()[1].name, "b");
  const auto* a = file.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, "BF16");
  EXPECT_TRUE(a->shape.empty());
  EXPECT_EQ(a->count(), 1);
  EXPECT_EQ(a->bytes, 2);
  const auto* b = file.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(b->count(), 6);
  EXPECT_EQ(test::bytes_of(file, *b).front(), 2);
  EXPECT_EQ(test::bytes_of(file, *b).back(), 25);
  char some[3];
  file.read(*b, 20, 3, some);
  EXPECT_EQ(std::string(some, 3), "\x16\x17\x18");
  const auto* z = file.find("z");
  ASSERT_NE(z, nullptr);
  EXPECT_EQ(z->count(), 0);
  EXPECT_EQ(z->bytes, 0);
  EXPECT_EQ(file.find("c"), nullptr);
  const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}, {"note", ""}};
  EXPECT_EQ(file.metadata(), metadata);
}

TEST_F(SafeTensorsTest, AcceptsEveryDtypeWithItsWidth) {
  const std::pair<const char*, int> widths[] = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},   {"I16", 2},
                                                {"U16", 2},     {"I32", 4},     {"U32", 4},  {"I64", 8},
                                                {"U64", 8},     {"F16", 2},     {"BF16", 2}, {"F32", 4},
                                                {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F64", 8}};
  for (const auto& [dtype, width] : widths) {
    for (const int slip : {0, 1}) {
      const std::string header = fmt::format(R"({{"t":{{"dtype":"{}","shape":[3],"data_offsets":[0,{}]}}}})",
                                             dtype, 3 * width + slip);
      const auto error = open_error(put(file_of(header, static_cast<std::size_t>(3 * width + slip))));
      EXPECT_EQ(error.has_value(), slip == 1) << dtype << " " << slip;
    }
  }
}

TEST_F(SafeTensorsTest, AcceptsWhatIsEmpty) {
  const SafeTensors nothing(put(file_of("{}", 0)));
  EXPECT_TRUE(nothing.entries().empty());
  const SafeTensors no_notes(put(file_of(R"({"__metadata__":{}})", 0)));
  EXPECT_TRUE(no_notes.metadata().empty());
  // Several empty tensors at one place overlap nobody.
  const SafeTensors file(put(file_of(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},
      "b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"c":{"dtype":"F32","shape":[5,0],"data_offsets":[0,0]}})",
                                     4)));
  EXPECT_EQ(file.entries().size(), 3u);
}

struct Malformed {
  const char* name;
  std::string bytes;
  const char* told;  // part of the message
};

std::string tensor(const std::string& body, std::size_t data_bytes = 4) {
  return file_of(R"({"t":)" + body + "}", data_bytes);
}

std::vector<Malformed> frames() {
  const std::string good = R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  return {
      {"empty_file", "", "truncated"},
      {"seven_bytes", std::string(7, '\0'), "truncated"},
      {"length_zero", u64(0), "does not begin with '{'"},
      {"length_beyond_file", u64(3) + "{}", "truncated: the header should end at byte 11, the file at 10"},
      {"length_over_limit", u64(100'000'001) + "{}", "at most 100000000"},
      {"length_huge", u64(std::numeric_limits<std::uint64_t>::max()) + "{}", "at most 100000000"},
      {"length_sign_bit", u64(std::uint64_t{1} << 63) + "{}", "at most 100000000"},
      {"leading_space", file_of(" " + good, 4), "does not begin with '{'"},
      {"byte_order_mark", file_of("\xEF\xBB\xBF" + good, 4), "does not begin with '{'"},
      {"not_an_object", file_of("[1,2]", 0), "does not begin with '{'"},
      {"padding_newline", file_of(good + "\n", 4), "does not end with '}'"},
      {"padding_zeros", file_of(good + std::string(3, '\0'), 4), "does not end with '}'"},
      {"zero_byte_inside", file_of(good + std::string(1, '\0') + "{}", 4), "zero byte"},
      {"two_objects", file_of(good + "{}", 4), "not valid JSON"},
      {"unclosed", file_of(good.substr(0, good.size() - 1), 4), "not valid JSON"},
      {"trailing_comma", file_of(R"({"__metadata__":{},})", 0), "not valid JSON"},
      {"single_quotes", file_of("{'t':{}}", 0), "not valid JSON"},
      {"comment", file_of("{/*x*/}", 0), "not valid JSON"},
      {"broken_utf8", file_of("{\"\xC3\x28\":{}}", 0), "not valid JSON"},
      {"lone_surrogate", file_of(R"({"\ud800":{}})", 0), "not valid JSON"},
      {"random_text", std::string("This is no such file at all."), "at most 100000000"},
      {"pickle", std::string("\x80\x02}q\x00X\x01\x00\x00\x00", 10), "is a pickle"},
  };
}

std::vector<Malformed> fields() {
  return {
      {"tensor_is_number", tensor("4"), "\"t\" is 4"},
      {"tensor_is_null", tensor("null"), "\"t\" is null"},
      {"tensor_is_array", tensor("[]"), "\"t\" is an array"},
      {"no_dtype", tensor(R"({"shape":[1],"data_offsets":[0,4]})"), "has no dtype"},
      {"no_shape", tensor(R"({"dtype":"F32","data_offsets":[0,4]})"), "has no shape"},
      {"no_offsets", tensor(R"({"dtype":"F32","shape":[1]})"), "has no data_offsets"},
      {"empty_entry", tensor("{}"), "has no dtype"},
      {"extra_key", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})"), "has the key \"x\""},
      {"unknown_dtype", tensor(R"({"dtype":"F31","shape":[1],"data_offsets":[0,4]})"), "dtype \"F31\""},
      {"lower_case_dtype", tensor(R"({"dtype":"f32","shape":[1],"data_offsets":[0,4]})"), "dtype \"f32\""},
      {"empty_dtype", tensor(R"({"dtype":"","shape":[1],"data_offsets":[0,4]})"), "dtype \"\""},
      {"dtype_number", tensor(R"({"dtype":7,"shape":[1],"data_offsets":[0,4]})"), "a dtype, a text"},
      {"shape_number", tensor(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"), "an array of numbers"},
      {"shape_text", tensor(R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})"), "a dimension"},
      {"shape_nested", tensor(R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})"), "a dimension"},
      {"shape_negative", tensor(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), "a dimension"},
      {"shape_fraction", tensor(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"), "a dimension"},
      {"shape_true", tensor(R"({"dtype":"F32","shape":[true],"data_offsets":[0,4]})"), "a dimension"},
      {"shape_too_large", tensor(R"({"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,4]})"),
       "a dimension of 18446744073709551615"},
      {"shape_rank",
       tensor(R"({"dtype":"F32","shape":[1)" +
              [] {
                std::string ones;
                for (int i = 0; i < 64; ++i) ones += ",1";
                return ones;
              }() +
              R"(],"data_offsets":[0,4]})"),
       "more than 64 dimensions"},
      {"one_offset", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4]})"), "fewer than two"},
      {"no_offset", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[]})"), "fewer than two"},
      {"three_offsets", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})"), "more than two"},
      {"offset_negative", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})"), "an offset"},
      {"offset_beyond_64_bits",
       tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999]})"), "an offset"},
      {"metadata_number", file_of(R"({"__metadata__":{"a":1}})", 0), "only text is allowed"},
      {"metadata_object", file_of(R"({"__metadata__":{"a":{}}})", 0), "only text is allowed"},
      {"metadata_null", file_of(R"({"__metadata__":{"a":null}})", 0), "only text is allowed"},
      {"metadata_text", file_of(R"({"__metadata__":"a"})", 0), "an object is expected"},
      {"metadata_twice_inside", file_of(R"({"__metadata__":{"a":"1","a":"1"}})", 0), "\"a\" appears twice"},
      {"metadata_twice", file_of(R"({"__metadata__":{},"__metadata__":{}})", 0), "appears twice"},
      {"name_twice",
       file_of(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                                 "t":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
               4),
       "\"t\" appears twice"},
      {"name_twice_escaped",
       file_of(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                                 "\u0074":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
               4),
       "appears twice"},
      {"field_twice", tensor(R"({"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]})"),
       "appears twice"},
  };
}

std::vector<Malformed> places() {
  const auto two = [](const char* a, const char* b, std::size_t bytes) {
    return file_of(fmt::format(R"({{"a":{{"dtype":"U8","shape":[2],"data_offsets":{}}},)"
                               R"("b":{{"dtype":"U8","shape":[2],"data_offsets":{}}}}})",
                               a, b),
                   bytes);
  };
  return {
      {"offsets_reversed", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"),
       "data_offsets [4, 0]"},
      {"size_too_small", tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), "takes 8 bytes"},
      {"size_too_large", tensor(R"({"dtype":"F16","shape":[1],"data_offsets":[0,4]})"), "takes 2 bytes"},
      {"size_of_empty", tensor(R"({"dtype":"F32","shape":[0],"data_offsets":[0,4]})"), "takes 0 bytes"},
      {"size_of_scalar", tensor(R"({"dtype":"F64","shape":[],"data_offsets":[0,4]})"), "takes 8 bytes"},
      {"product_overflows",
       tensor(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0),
       "larger than any file"},
      {"product_overflows_to_fit",
       tensor(R"({"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]})"),
       "larger than any file"},
      {"begins_late", tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", 8),
       "4 bytes that belong to no"},
      {"hole", two("[0,2]", "[3,5]", 5), "1 bytes that belong to no tensor lie before \"b\""},
      {"overlap", two("[0,2]", "[1,3]", 3), "\"b\" begins at offset 1, inside \"a\""},
      {"same_place", two("[0,2]", "[0,2]", 2), "inside \"a\""},
      {"truncated_data", two("[0,2]", "[2,4]", 3), "the tensors take 4 bytes, 3 are there"},
      {"no_data", two("[0,2]", "[2,4]", 0), "truncated"},
      {"extra_data", two("[0,2]", "[2,4]", 5), "1 bytes that belong to no tensor lie at the end"},
      {"data_without_tensors", file_of("{}", 3), "3 bytes that belong to no tensor lie at the end"},
      {"end_wraps",
       tensor(R"({"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]})"),
       "truncated"},
      {"begin_wraps",
       tensor(R"({"dtype":"U8","shape":[4],"data_offsets":[18446744073709551612,18446744073709551615]})"),
       "data_offsets [18446744073709551612"},
  };
}

TEST_F(SafeTensorsTest, RefusesWhatIsMalformedAndSaysWhy) {
  int cases = 0;
  for (const auto& table : {frames(), fields(), places()}) {
    for (const Malformed& m : table) {
      ++cases;
      const std::string path = put(m.bytes);
      const auto error = open_error(path);
      ASSERT_TRUE(error.has_value()) << m.name << " was accepted";
      EXPECT_EQ(error->code(), Errc::kUsage) << m.name;
      EXPECT_EQ(error->where(), path) << m.name;
      EXPECT_HAS(error->message(), m.told) << m.name << ": " << error->message();
      EXPECT_FALSE(error->hint().empty()) << m.name;
      EXPECT_LT(error->message().size(), 600u) << m.name;
    }
  }
  EXPECT_GE(cases, 60);
}

TEST_F(SafeTensorsTest, RefusesWhatIsNoFile) {
  EXPECT_HAS(open_error(dir_ / "absent")->message(), "No such file");
  EXPECT_HAS(open_error(dir_ / "")->message(), "this is a directory");
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  EXPECT_HAS(open_error(dir_ / "pipe")->message(), "this is a pipe");  // and does not wait
}

TEST_F(SafeTensorsTest, ShowsNamesFromFilesHarmlessly) {
  const std::string name = "\\u001b[31m" + std::string(5000, 'x');
  const auto error = open_error(put(file_of("{\"" + name + "\":7}", 0)));
  ASSERT_TRUE(error.has_value());
  EXPECT_LT(error->message().size(), 300u);
  EXPECT_EQ(error->message().find('\x1b'), std::string::npos);
}

// A header of nothing but brackets must not cost a stack frame or a node each.
TEST_F(SafeTensorsTest, DeepNestingIsRefusedAtOnce) {
  const std::string brackets(20'000'000, '[');
  const auto before = peak_resident_bytes();
  const auto error = open_error(put(file_of("{\"a\":" + brackets + "}", 0)));
  ASSERT_TRUE(error.has_value());
  EXPECT_HAS(error->message(), "an array");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose own memory would be counted
  // The strings of this test: the header, the file made of it, the mapping of the file. A tree would take 16
  // bytes a bracket and more.
  EXPECT_LT(peak_resident_bytes() - before, 8 * 20'000'000);
#else
  EXPECT_GT(before, 0);
#endif
}

// Every prefix of a good file is refused, and no change of a single byte does worse than an error; what is
// accepted holds together.
TEST_F(SafeTensorsTest, SurvivesTruncationAndDamage) {
  const std::string good =
      file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
              R"("b":{"dtype":"I8","shape":[3],"data_offsets":[16,19]}}  )",
              19);
  ASSERT_FALSE(open_error(put(good)).has_value());
  for (std::size_t n = 0; n < good.size(); ++n) {
    EXPECT_TRUE(open_error(put(good.substr(0, n))).has_value()) << n;
  }
  const std::uint64_t seed = test::test_seed(20240611);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1000; ++i) {
    std::string bytes = good;
    for (int changes = static_cast<int>(random() % 3); changes >= 0; --changes) {
      // Mostly characters that mean something to a parser.
      static constexpr std::string_view kLikely = "{}[]\",:0123456789-e. ";
      const auto place = random() % bytes.size();
      bytes[place] = random() % 4 == 0 ? static_cast<char>(random()) : kLikely[random() % kLikely.size()];
    }
    const std::string path = put(bytes);
    try {
      const SafeTensors file(path);
      std::int64_t sum = 0;
      for (const auto& entry : file.entries()) {
        for (const char c : test::bytes_of(file, entry)) sum += static_cast<unsigned char>(c);
      }
      ASSERT_GE(sum, 0);
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Errc::kUsage);
    }
  }
}

// A file that another program cuts, or that its drive cannot read, is an error: what is mapped would end the
// process.
TEST_F(SafeTensorsTest, AFileThatIsCutIsAnError) {
  constexpr std::size_t kBytes = 3 << 20;
  const std::string path = put(file_of(
      fmt::format(R"({{"t":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}})", kBytes), kBytes));
  const SafeTensors file(path, "the weights of a model");
  const auto* t = file.find("t");
  ASSERT_NE(t, nullptr);
  fs::resize_file(path, 4096);
  std::vector<char> out(kBytes);
  file.read(*t, 0, 1000, out.data());  // what is left
  const auto error = test::thrown_by([&] { file.read(*t, 1000, 5000, out.data()); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), Errc::kIo);
  EXPECT_EQ(error->where(), path);
  EXPECT_HAS(error->message(), "the weights of a model ends at byte 4096; it had 31");
  EXPECT_HAS(error->message(), "(in \"t\")");
}

// Files that other programs wrote.
std::string shared_directory() {
  if (const char* path = std::getenv("ZG_SHARED_DATA")) return std::string(path) + "/safetensors";
  return test::in_source("../shared/data/safetensors");
}

TEST(SafeTensorsReal, ThreeDtypesOfOneModelAgree) {
  if (!fs::exists(shared_directory()))
    GTEST_SKIP() << "no " << shared_directory() << "; ZG_SHARED_DATA names it";
  const SafeTensors f32(shared_directory() + "/model2vec_f32.safetensors");
  const SafeTensors f16(shared_directory() + "/model2vec_f16.safetensors");
  const SafeTensors i8(shared_directory() + "/model2vec_i8.safetensors");
  const auto *a = f32.find("embeddings"), *b = f16.find("embeddings"), *c = i8.find("embeddings");
  ASSERT_TRUE(a && b && c);
  EXPECT_EQ(a->dtype + b->dtype + c->dtype, "F32F16I8");
  EXPECT_EQ(a->shape, (std::vector<std::int64_t>{29528, 2}));
  EXPECT_EQ(b->shape, a->shape);
  EXPECT_EQ(c->shape, a->shape);
  const std::string of_f32 = test::bytes_of(f32, *a), of_f16 = test::bytes_of(f16, *b),
                    of_i8 = test::bytes_of(i8, *c);
  double largest = 0;
  for (std::int64_t i = 0; i < a->count(); ++i) {
    float x;
    std::uint16_t h;
    std::memcpy(&x, of_f32.data() + 4 * i, 4);
    std::memcpy(&h, of_f16.data() + 2 * i, 2);
    // Half has 11 bits: the nearest is within 2^-12 of a normal number (2^-11 if it was rounded twice).
    ASSERT_NEAR(half_to_float(h), x, std::ldexp(std::abs(x), -11) + 0x1p-25) << i;
    largest = std::max(largest, static_cast<double>(std::abs(x)));
  }
  // The int8 file is scaled so that the largest magnitude is 127; each step is then largest / 127, and one
  // step covers either way of rounding.
  for (std::int64_t i = 0; i < a->count(); ++i) {
    float x;
    std::memcpy(&x, of_f32.data() + 4 * i, 4);
    ASSERT_NEAR(static_cast<std::int8_t>(of_i8[static_cast<std::size_t>(i)]) * largest / 127, x,
                largest / 127)
        << i;
  }
}

TEST(SafeTensorsReal, ReferenceFilesOfThisRepository) {
  for (const char* name : {"gpt2_tiny", "llama_tiny"}) {
    const SafeTensors file(test::in_source("tests/reference/") + name + ".safetensors");
    const auto* logits = file.find("logits");
    ASSERT_NE(logits, nullptr);
    EXPECT_EQ(logits->dtype, "F32");
    EXPECT_EQ(logits->shape, (std::vector<std::int64_t>{2, 32, 257}));
    EXPECT_EQ(file.metadata().front().first, "config");
  }
}

}  // namespace
}  // namespace zg
