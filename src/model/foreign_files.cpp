#include "model/foreign_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <vector>

#include "model/hf_text.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"

namespace zg::hf {
namespace {

namespace fs = std::filesystem;

struct Kind {
  std::string_view begin;
  const char *what, *hint;
};

constexpr const char* kPickleHint =
    "such files are called pytorch_model.bin: give it that name, and convert it with transformers' "
    "save_pretrained()";

constexpr std::string_view operator""_bytes(const char* text, std::size_t n) {
  return {text, n};
}

constexpr std::array kKinds{
    Kind{"version https://git-lfs.github.com/spec/",
         "is a pointer of Git LFS, not the file that it stands for", "run `git lfs pull` in its repository"},
    Kind{"PK\x03\x04", "is a zip archive: torch.save() writes such files", kPickleHint},
    Kind{"\x80\x02", "is a pickle: torch.save() writes such files", kPickleHint},
    Kind{"\x80\x03", "is a pickle: torch.save() writes such files", kPickleHint},
    Kind{"\x80\x04", "is a pickle: torch.save() writes such files", kPickleHint},
    Kind{"\x80\x05", "is a pickle: torch.save() writes such files", kPickleHint},
    Kind{"GGUF", "is a GGUF file, of llama.cpp",
         "convert it with transformers: from_pretrained(DIRECTORY, gguf_file=NAME), then save_pretrained()"},
    Kind{"\x89HDF\r\n", "is an HDF5 file: TensorFlow's models are such",
         "convert it with transformers: from_pretrained(DIRECTORY, from_tf=True), then save_pretrained()"},
    Kind{"\x93NUMPY", "is a NumPy array", "save the model with transformers' save_pretrained()"},
    Kind{"\x1f\x8b", "is compressed by gzip", "unpack it: gzip -d"},
    Kind{"\x28\xb5\x2f\xfd", "is compressed by zstd", "unpack it: zstd -d"},
    Kind{"\xfd"
         "7zXZ\0"_bytes,
         "is compressed by xz", "unpack it: xz -d"},
    Kind{"BZh", "is compressed by bzip2", "unpack it: bzip2 -d"},
    Kind{"PAR1", "is a Parquet file", "name the directory of a model"},
    Kind{"Entry not found", "is what a server answers for a file that it does not have",
         "the download went wrong: fetch the file again"},
};

bool is_page(std::string_view head) {
  const std::size_t first = head.find_first_not_of(" \t\r\n\xef\xbb\xbf");
  if (first == head.npos) return false;
  std::string begin(head.substr(first, 16));
  std::transform(begin.begin(), begin.end(), begin.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* tag : {"<!doctype", "<html", "<head", "<?xml"}) {
    if (begin.rfind(tag, 0) == 0) return true;
  }
  return false;
}

bool ends_in(const std::string& name, std::string_view end) {
  return name.size() >= end.size() && std::string_view(name).substr(name.size() - end.size()) == end;
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error) {
    const bool none = error == std::errc::no_such_file_or_directory;
    throw Error(Errc::kUsage, directory,
                none ? "there is no such directory" : "cannot be listed: " + errno_text(error.value()),
                none ? "check the path" : "name a directory that you may read");
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The first of the names that ends in one of `ends`, if any.
std::optional<std::string> first_that_ends(const std::vector<std::string>& names,
                                           std::initializer_list<const char*> ends) {
  for (const std::string& name : names) {
    for (const char* end : ends) {
      if (ends_in(name, end)) return name;
    }
  }
  return std::nullopt;
}

std::string convert(const std::string& directory, const std::string& more = "") {
  return fmt::format(
      "convert it: python3 -c \"import transformers as t; t.AutoModelForCausalLM.from_pretrained('{}'{})"
      ".save_pretrained('NEW')\"",
      directory, more);
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::binary_search(names.begin(), names.end(), name);
}

}  // namespace

void refuse_foreign(std::string_view head, const std::string& path) {
  for (const Kind& kind : kKinds) {
    if (head.substr(0, kind.begin.size()) == kind.begin)
      throw Error(Errc::kUsage, path, kind.what, kind.hint);
  }
  if (is_page(head)) {
    throw Error(Errc::kUsage, path, "is a page of HTML or XML, not the file itself",
                "the download went wrong (a login, or a page about the file): fetch the file again");
  }
  constexpr std::size_t kTarMark = 257;
  if (head.size() > kTarMark && head.substr(kTarMark, 5) == "ustar")
    throw Error(Errc::kUsage, path, "is a tar archive", "unpack it: tar -xf");
}

bool is_there(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0) return true;
  const int error = errno;
  if (error != ENOENT && error != ENOTDIR) {
    throw Error(Errc::kUsage, path, "cannot be examined: " + errno_text(error),
                "check the path and its permissions");
  }
  if (error == ENOTDIR || ::lstat(path.c_str(), &st) != 0) return false;
  throw Error(Errc::kUsage, path, "is a symbolic link to a file that is not there",
              "fetch the file that it stands for");
}

std::string read_json_text(const std::string& path, const std::string& what) {
  const InputFile file(path, what);
  std::string head(kForeignHead, '\0');
  head.resize(static_cast<std::size_t>(file.read_some(head.data(), kForeignHead, 0)));
  refuse_foreign(head, path);
  // A header's length in 8 bytes, followed by a bracket.
  if (head.size() > 8 && head[8] == '{' && head[7] == '\0' && head[6] == '\0' && head[5] == '\0')
    throw Error(Errc::kUsage, path, "is a safetensors file; " + what + " is JSON", "name the right file");
  return read_text_file(path, what);
}

void refuse_without_weights(const std::string& directory, const std::string& wanted) {
  const std::vector<std::string> names = names_in(directory);
  const std::string instead = fmt::format("has no {}, but", wanted);
  if (const auto bin = first_that_ends(names, {".bin", ".bin.index.json", ".pt", ".pth", ".ckpt"});
      bin && bin->rfind("adapter_model", 0) != 0) {
    throw Error(Errc::kUsage, directory,
                fmt::format("{} {}: weights that torch.save() wrote, a pickle", instead, in_quotes(*bin)),
                convert(directory));
  }
  if (const auto gguf = first_that_ends(names, {".gguf"})) {
    throw Error(Errc::kUsage, directory, fmt::format("{} {}, of llama.cpp", instead, in_quotes(*gguf)),
                convert(directory, fmt::format(", gguf_file='{}'", *gguf)));
  }
  if (const auto h5 = first_that_ends(names, {".h5", ".msgpack"})) {
    const bool flax = ends_in(*h5, ".msgpack");
    throw Error(Errc::kUsage, directory,
                fmt::format("{} {}, of {}", instead, in_quotes(*h5), flax ? "Flax" : "TensorFlow"),
                convert(directory, flax ? ", from_flax=True" : ", from_tf=True") + " with transformers 4");
  }
  if (has(names, "adapter_config.json")) {
    throw Error(Errc::kUsage, directory, instead + " adapter_config.json: it has adapters, no model",
                "name the directory of the model here, and this one as lora.from, or with --adapter");
  }
  if (const auto other = first_that_ends(names, {".safetensors"})) {
    throw Error(Errc::kUsage, directory, fmt::format("{} {}", instead, in_quotes(*other)),
                "if that file has all weights, call it model.safetensors; of several, fetch the index, too");
  }
  throw Error(Errc::kUsage, directory, fmt::format("has neither {} nor other weights", wanted),
              "name the directory of a Hugging Face model in the safetensors format");
}

void refuse_without_adapter(const std::string& directory, const std::string& wanted) {
  const std::vector<std::string> names = names_in(directory);
  if (const auto bin = first_that_ends(names, {".bin", ".pt", ".pth"})) {
    throw Error(
        Errc::kUsage, directory,
        fmt::format("has no {}, but {}: weights that torch.save() wrote, a pickle", wanted, in_quotes(*bin)),
        fmt::format("convert it: python3 -c \"import torch; from safetensors.torch import save_file; "
                    "save_file(torch.load('{0}/{1}', map_location='cpu', weights_only=True), "
                    "'{0}/{2}')\"",
                    directory, *bin, wanted));
  }
  if (has(names, "config.json")) {
    throw Error(Errc::kUsage, directory, fmt::format("has no {}, but config.json: a model", wanted),
                "name the directory of adapters");
  }
  throw Error(Errc::kUsage, directory, "has no " + wanted,
              "name a directory of adapters, as PEFT or a run of ziggurat writes it");
}

void refuse_without_config(const std::string& directory) {
  std::error_code error;
  if (fs::is_regular_file(directory, error)) {
    throw Error(Errc::kUsage, directory, "is a file; the directory of a model is expected",
                "name the directory, with config.json and model.safetensors in it");
  }
  const std::vector<std::string> names = names_in(directory);
  std::string hint = "name the directory of a Hugging Face model", has_instead;
  if (has(names, "adapter_config.json")) {
    has_instead = ", but adapter_config.json: it has adapters, no model";
    hint = "name the directory of the model here, and this one as lora.from, or with --adapter";
  } else if (const auto gguf = first_that_ends(names, {".gguf"})) {
    has_instead = fmt::format(", but {}, of llama.cpp", in_quotes(*gguf));
    hint = convert(directory, fmt::format(", gguf_file='{}'", *gguf));
  } else if (has(names, "params.json")) {
    has_instead = ", but params.json: Meta's own files of a Llama";
    hint = "fetch the model in the form of Hugging Face";
  } else if (first_that_ends(names, {".safetensors"})) {
    hint = "fetch the model's config.json, too";
  }
  throw Error(Errc::kUsage, directory, "has no config.json" + has_instead, hint);
}

}  // namespace zg::hf
