// Runs before the first paint, so that nobody who chose dark sees a flash of light.
document.documentElement.dataset.theme = localStorage.getItem("holdfast-theme")
  ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
