// Loaded before the page is drawn, so that it never shows in the other theme first.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("swarm.theme");
  } catch {
    // without storage, the system's theme is used
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
