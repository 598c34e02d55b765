"""Messages in files, as NVFLARE's file pipes exchange them, without NVFLARE."""
