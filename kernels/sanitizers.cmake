# ENGRAM_SANITIZE: instruments every target of ours. For builds of their own, never for what is installed.
if(ENGRAM_SANITIZE STREQUAL "address")
  set(sanitizers address,undefined)
elseif(ENGRAM_SANITIZE STREQUAL "thread")
  set(sanitizers thread)
elseif(ENGRAM_SANITIZE)
  message(FATAL_ERROR "ENGRAM_SANITIZE is '${ENGRAM_SANITIZE}'; it may be address or thread")
else()
  return()
endif()

# Stops at the first finding, undefined behaviour included. The library's own assertions catch an index that is out
# of a span's bounds and still inside some allocation.
target_compile_options(engram_options INTERFACE -fsanitize=${sanitizers} -fno-sanitize-recover=all -O1
                                                -fno-omit-frame-pointer)
target_compile_definitions(engram_options INTERFACE _GLIBCXX_ASSERTIONS)
target_link_options(engram_options INTERFACE -fsanitize=${sanitizers})
