# Builds the parsers of untrusted files and their tests a second time, under AddressSanitizer and
# UndefinedBehaviorSanitizer, as a part of a release build. Everything else is linked from the release build.
# `tools/test.sh asan` builds the whole tree under them.
# Compiling takes most of the time: at -O0 half of that at -O1.
set(checked_options -O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
# GCC reports false positives of these under a sanitizer's instrumentation.
list(APPEND checked_options -Wno-maybe-uninitialized -Wno-stringop-overflow)

set(patterns src/base/*.cpp src/data/*.cpp src/model/hf_*.cpp src/checkpoint/*.cpp
  src/store/replay*.cpp)
foreach(pattern IN LISTS patterns)
  file(GLOB found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${pattern})
  list(APPEND checked_sources ${found})
endforeach()
foreach(name io/hash src/model/safetensors src/model/adapter_files src/model/adapters src/model/config src/model/units
    src/store/access_trace src/store/program src/store/table src/train/run_checkpoints src/train/checkpoint_bits src/train/checkpointer
    src/cli/chat_template src/cli/io_tune_state)
  list(APPEND checked_sources ${PROJECT_SOURCE_DIR}/${name}.cpp)
endforeach()

# What a source file is compiled with holds in its own folder's CMakeLists.txt alone.
if(SENTENCEPIECE_INCLUDE AND SENTENCEPIECE_LIBRARY)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/data/sentencepiece.cpp PROPERTIES
    COMPILE_DEFINITIONS ZG_SENTENCEPIECE)
endif()

set_source_files_properties(${PROJECT_SOURCE_DIR}/src/checkpoint/manifest.cpp PROPERTIES
  COMPILE_DEFINITIONS ZG_VERSION="${PROJECT_VERSION}")

# Objects, not an archive: so none of these is taken from the release's archives.
add_library(zg_checked OBJECT ${checked_sources})
target_include_directories(zg_checked PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(zg_checked PRIVATE zg_flags zg_train nlohmann_json::nlohmann_json spdlog::spdlog
  PkgConfig::XXHASH)
target_compile_options(zg_checked PRIVATE ${checked_options})

# zg_checked(NAME INPUTS SOURCES...): one program, which is one test, with so many inputs by chance of each kind.
function(zg_checked name inputs)
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  add_executable(zg_checked_${name} ${ARGN} $<TARGET_OBJECTS:zg_checked> $<TARGET_OBJECTS:zg_test_places>)
  target_include_directories(zg_checked_${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src
    ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(zg_checked_${name} PRIVATE zg_flags zg_train nlohmann_json::nlohmann_json spdlog::spdlog
    PkgConfig::XXHASH GTest::gtest GTest::gtest_main)
  target_compile_options(zg_checked_${name} PRIVATE ${checked_options})
  target_link_options(zg_checked_${name} PRIVATE -fsanitize=address,undefined)
  add_test(NAME checked.${name} COMMAND zg_checked_${name} --gtest_brief=1)
  set_tests_properties(checked.${name} PROPERTIES LABELS checked TIMEOUT 900
    ENVIRONMENT "ZG_TEST_INPUTS=${inputs};ASAN_OPTIONS=detect_leaks=1;LSAN_OPTIONS=suppressions=${CMAKE_CURRENT_SOURCE_DIR}/lsan.supp")
endfunction()

file(GLOB fuzz_tests CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/*.cpp)
zg_checked(fuzz 100 ${fuzz_tests})
# Not those of large texts, which take minutes so, nor those that end a process in the middle, whose memory then counts as
# lost.
zg_checked(data 10 data/damage_test.cpp data/file_kind_test.cpp data/hostile_tokenizer_test.cpp
  data/records_test.cpp data/sentencepiece_test.cpp)
zg_checked(model 100 model/safetensors_test.cpp model/hf_config_test.cpp model/hf_test.cpp model/lora_test.cpp
  model/coded_files_test.cpp support/process.cpp)
