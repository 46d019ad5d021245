# Installs the build into WORK, then configures, builds and runs projects of others against it: this folder's, the
# examples, and requests for single components.
#   cmake -DBUILD=... -DWORK=... -DSOURCE=... -DEXAMPLE=... -DCXX=... [-DLAUNCHER=ccache] -P run.cmake
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${text}")
  endif()
  set(text "${text}" PARENT_SCOPE)
endfunction()
function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "expected ${pattern} in:\n${text}")
  endif()
endfunction()

set(configure ${CMAKE_COMMAND} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_C_COMPILER_LAUNCHER=${LAUNCHER})
file(REMOVE_RECURSE ${WORK})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
step(${WORK}/prefix/bin/ziggurat --version)

step(${configure} -S ${SOURCE} -B ${WORK}/build)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/use)

# The examples, away from the tree. Each program is built by itself too, and then only what its part needs is looked for.
file(COPY ${EXAMPLE}/ DESTINATION ${WORK}/example)
function(example name pattern)
  step(${configure} -DEXAMPLES=${name} -S ${WORK}/example -B ${WORK}/example/${name})
  file(STRINGS ${WORK}/example/${name}/CMakeCache.txt found
    REGEX "^(URING_FOUND|HWLOC_FOUND|HWY_FOUND|DNNL[^:]*|nlohmann_json_DIR|fmt_DIR|CMAKE_CXX_COMPILER_AR):")
  string(REGEX REPLACE ":[^;]*" "" found "${found}")
  list(SORT found)
  expect("${found}" "^${pattern}$")
  step(${CMAKE_COMMAND} --build ${WORK}/example/${name})
endfunction()
function(run_example name pattern)
  file(MAKE_DIRECTORY ${WORK}/drive0 ${WORK}/drive1)
  step(${WORK}/example/${name}/${name} ${ARGN})
  expect("${text}" "${pattern}")
  file(GLOB left ${WORK}/drive?/*)
  expect("${left}" "^$")
endfunction()
function(refused code pattern)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE got OUTPUT_VARIABLE text ERROR_VARIABLE text)
  expect("${got}" "^${code}$")
  expect("${text}" "${pattern}")
endfunction()

example(io_stream "CMAKE_CXX_COMPILER_AR;URING_FOUND;fmt_DIR")
run_example(io_stream "written .*read .*nvme0 .*drive0: wrote .*nvme1 .*drive1: wrote "
  -n 6 -s 1000000 -b 4 ${WORK}/drive0 ${WORK}/drive1)

example(store_stream "CMAKE_CXX_COMPILER_AR;HWLOC_FOUND;HWY_FOUND;URING_FOUND;fmt_DIR")
set(small --total 64MiB --host 8MiB --device 2MiB --tensor 6MiB --steps 2)
run_example(store_stream "step 0 .*step 2 .*nvme->host [4-7][0-9].[0-9] MiB.*tensor.0.*peak of host memory [0-8].[0-9] MiB"
  ${small} ${WORK}/drive0 ${WORK}/drive1)
run_example(store_stream "--total 4GiB" --help)
refused(2 "needs a directory" ${WORK}/example/store_stream/store_stream ${small})
refused(2 "${WORK}/drive7" ${WORK}/example/store_stream/store_stream ${small} ${WORK}/drive7)

# In C alone: nothing but the shared library is looked for.
example(store_c "")
run_example(store_c "all right: .*peak of host [0-9]+" --total 32 --host 4 --steps 2 ${WORK}/drive0)
run_example(store_c "--total 1024" --help)
refused(2 "${WORK}/drive7" ${WORK}/example/store_c/store_c --total 8 --host 4 ${WORK}/drive7)

# All of them in one project, as its README says.
step(${configure} -S ${WORK}/example -B ${WORK}/example/all)

# Each component alone finds all that it links to; one that does not exist is refused with the names of those that do.
step(${configure} -DASK=base,io,kernels,device,store,store_c,optim,model,data,config,engine,plan,train -S ${SOURCE}/components
  -B ${WORK}/components)
execute_process(COMMAND ${configure} -DASK=tape -S ${SOURCE}/components -B ${WORK}/unknown
  RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
expect("${code}" "^[1-9]")
string(REGEX REPLACE "[ \n]+" " " text "${text}")
expect("${text}" "there is no component tape, but there are base, io, .*store, .*train")
